"""An OpenAI-compatible vLLM endpoint as an engine: token ids in, token ids and log-probs out. Imports no engine.

Start the server with `--logprobs-mode processed_logprobs` (else log-probs are those before temperature) and, to refit
it, with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "nccl"}'` (docs/generation.md).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pivotrl.errors import UserError
from pivotrl.generation.base import StatefulEngine
from pivotrl.generation.engine import Completion, OnFinished, RefitError, Sampling, refuse_non_finite
from pivotrl.generation.http_json import HttpError, JsonClient
from pivotrl.generation.refit_check import ExpectedWeights, RefitCheck
from pivotrl.generation.requests import check_lengths, check_request, first_seed
from pivotrl.generation.routed import RoutedLayers
from pivotrl.generation.state import Phase

if TYPE_CHECKING:
    import numpy as np

CONNECTIONS = 1024  # requests in flight, one a prompt; the server batches them


class WeightSender(Protocol):
    """The trainer's end of vLLM's weight-transfer API (see `server_weights.NcclSender`)."""

    def send(self, client: JsonClient, weights: Iterable[tuple[str, Any]], version: int) -> None: ...


class ServerEngine(StatefulEngine):
    """`pivotrl.generation.engine.Engine` over HTTP, for disaggregated rollouts and for judges.

    Args:
        url: of the server, without /v1.
        model: its served name; None: the only one that it serves.
        max_length: tokens of prompt and completion; None: the server's.
        sender: carries weights at a refit; None: this engine cannot be refitted.
        folder: Hugging Face folder of the model; names and shapes of every refit are checked against it.
        routed_experts: completions carry the experts of each token; needs `folder`.
        controls: whether this process pauses, refits and resumes the server: one of a trainer's does.

    The samples of a prompt are one request (`n`), so the server computes the prompt once.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        stop_token_ids: Sequence[int] = (),
        max_length: int | None = None,
        sender: WeightSender | None = None,
        timeout_seconds: float = 600.0,
        folder: Path | None = None,
        controls: bool = True,
        routed_experts: bool = False,
    ) -> None:
        super().__init__()
        self._client = JsonClient(url, timeout_seconds)
        served = self._client.get("/v1/models").get("data", [])
        names = [row["id"] for row in served]
        if model is None and len(names) != 1:
            raise UserError(f"{url} serves {names}; name one of them")
        if model is not None and model not in names:
            raise UserError(f"{url} does not serve {model!r}; it serves {names}")
        self._model = model or names[0]
        row = next(row for row in served if row["id"] == self._model)
        self._max_length = max_length or row.get("max_model_len") or 2**31
        self._stop_token_ids = list(stop_token_ids)
        self._sender, self._controls = sender, controls
        self._expected = None if folder is None else ExpectedWeights.from_folder(folder)
        self._routed = RoutedLayers.of_folder(folder) if routed_experts and folder is not None else None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        seeds: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. Raises UserError for what the server refuses or does not give back."""
        self._state.require_generate()
        check_request(prompts, n, seeds)
        check_lengths(prompts, sampling.max_new_tokens, self._max_length)
        if not prompts:
            return []
        order = sorted(range(len(prompts)), key=lambda i: tuple(prompts[i]))  # what shares a history is adjacent
        groups: list[list[Completion]] = [[] for _ in prompts]
        with ThreadPoolExecutor(min(CONNECTIONS, len(prompts))) as pool:
            asked = {pool.submit(self._ask, self._body(prompts[i], sampling, n, seeds[i])): i for i in order}
            try:
                for answer in as_completed(asked):
                    groups[i := asked[answer]] = self._completions(answer.result(), n)
                    if on_finished:
                        for k, completion in enumerate(groups[i]):
                            on_finished(i, k, completion)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        refuse_non_finite(groups)
        return groups

    def score(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.score`."""
        self._state.require_generate()
        out = []
        for prompt, continuation in zip(prompts, continuations, strict=True):
            ids = [*prompt, *continuation]
            body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            rows = self._client.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
            out.append([float(rows[i][str(ids[i])]["logprob"]) for i in range(len(prompt), len(ids))])
        return out

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post("/v1/completions", body)

    def _body(self, prompt: Sequence[int], sampling: Sampling, n: int, seed: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "n": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "seed": first_seed(seed),  # the server adds k for sample k
            "stop_token_ids": self._stop_token_ids,
            "ignore_eos": True,  # only our stop ids end a completion
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    def _completions(self, answer: dict[str, Any], n: int) -> list[Completion]:
        choices = sorted(answer.get("choices", []), key=lambda choice: choice["index"])
        if len(choices) != n:
            raise RuntimeError(f"the server gave {len(choices)} completions of {n}")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return [self._completion(choice, details.get("cached_tokens") or 0) for choice in choices]

    def _completion(self, choice: dict[str, Any], cached: int) -> Completion:
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logprobs is None:
            raise UserError(
                f"{self._client.url}: the server gives back no {'token ids' if ids is None else 'log-probs'}; "
                "rollouts need vLLM 0.32 or newer (its `return_token_ids` extension)"
            )
        if len(ids) != len(logprobs):
            raise RuntimeError(f"the server gave {len(logprobs)} log-probs for {len(ids)} tokens")
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"the server ended a request with {choice['finish_reason']!r}; see its log")
        values = tuple(math.nan if value is None else float(value) for value in logprobs)
        given = choice.get("routed_experts")
        experts = None if given is None else decode_array(given)
        return Completion(
            tuple(ids),
            values,
            choice["finish_reason"],
            self.weight_version,
            cached,
            experts if self._routed is None else self._routed.pick(experts),
        )

    def _sleep(self, discard_weights: bool) -> None:
        """A server has an accelerator of its own: it is paused, and keeps weights and memory."""
        self._rl("/pause", "wait")

    def _wake(self) -> None:
        self._rl("/resume")

    def _load(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        if self._sender is None:
            raise RefitError(
                f"{self._client.url}: this server engine was made without a weight sender, so it cannot be refitted"
            )
        running = self._state.phase is Phase.READY
        if running:
            self._rl("/pause", "wait")  # what is in flight keeps its weights
        try:
            self._sender.send(self._client, self._checked(weights), version)
            if not self._controls:
                return
            self._client.post("/reset_prefix_cache", {})
            served = self._client.get("/weight_info").get("weight_version")
        except HttpError as error:
            raise RefitError(self._refused(error)) from error
        if str(served) != str(version):
            raise RefitError(f"{self._client.url} serves weight version {served} after the refit to {version}")
        if running:
            self._rl("/resume")

    def _checked(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The weights as they are sent: known, of the right shape, finite, none missing. Raises RefitError."""
        if self._expected is None or not self._controls:
            yield from weights
            return
        check = RefitCheck(self._expected)
        for name, tensor in weights:
            check.add(name, tuple(tensor.shape), finite=bool(tensor.isfinite().all()))
            yield name, tensor
        check.finish()

    def _close(self) -> None:
        pass

    def _rl(self, path: str, mode: str | None = None) -> None:
        if not self._controls:
            return
        try:
            self._client.post(path + (f"?mode={mode}" if mode else ""), {})
        except HttpError as error:
            if error.status != 404:
                raise
            # a server without these routes cannot be paused, and need not be: no memory is shared with it

    def _refused(self, error: HttpError) -> str:
        if error.status == 404:
            return (
                f"{self._client.url} offers no weight update ({error.path} is unknown); start it with "
                'VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
            )
        return f"refit of {self._client.url}: {error}"


def decode_array(text: str) -> np.ndarray:
    """An array that vLLM sent as base64 of a .npy file."""
    import numpy as np

    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array
