"""The server engine against a small HTTP server that answers as vLLM does."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from pivotrl.errors import UserError
from pivotrl.generation import http_json
from pivotrl.generation.engine import EngineStateError, NonFiniteLogprobs, RefitError, Sampling
from pivotrl.generation.http_json import JsonClient
from pivotrl.generation.server_engine import ServerEngine

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=4)


class FakeVllm:
    """Completes a prompt with its last id + k. `without`: routes that this server does not have."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.without: set[str] = set()
        self.busy = 0  # answers 503 this many times first
        self.version = "0"
        self.changes: dict[str, Any] = {}  # to each choice
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                fake.requests.append((self.path, body))
                status, answer = fake.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route = path.split("?")[0]
        if self.busy:
            self.busy -= 1
            return 503, {}
        if route in self.without:
            return 404, {"detail": "Not Found"}
        if route == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 64}]}
        if route == "/weight_info":
            return 200, {"weight_version": self.version}
        if route == "/update_weight_version":
            self.version = body["new_version"]
        if route != "/v1/completions":
            return 200, {}
        if "prompt_logprobs" in body:
            rows = [None, *({str(t): {"logprob": -0.5 * t}} for t in body["prompt"][1:])]
            return 200, {"choices": [{"prompt_logprobs": rows}]}
        if body["prompt"][0] == 63:
            return 400, {"error": "token 63 is out of vocabulary"}
        choices = [
            {
                "index": k,
                "token_ids": [body["prompt"][-1] + k, 2],
                "logprobs": {"token_logprobs": [-0.25, -1.5 - k]},
                "finish_reason": "stop",
                **self.changes,
            }
            for k in range(body["n"])
        ]
        return 200, {"choices": choices[::-1], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.setattr(http_json, "FIRST_PAUSE_SECONDS", 0.01)
    server = FakeVllm()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_token_ids_and_logprobs_come_back_in_order(fake: FakeVllm) -> None:
    engine = ServerEngine(fake.url + "/v1", stop_token_ids=[2])
    groups = engine.generate([[5, 6], [7, 8]], SAMPLING, 3, [1, 2])
    assert [[c.token_ids for c in group] for group in groups] == [[(6, 2), (7, 2), (8, 2)], [(8, 2), (9, 2), (10, 2)]]
    assert [c.logprobs for c in groups[0]] == [(-0.25, -1.5), (-0.25, -2.5), (-0.25, -3.5)]
    assert {(c.finish_reason, c.weight_version, c.cached_prompt_tokens) for c in groups[1]} == {("stop", 0, 3)}
    sent = [body for path, body in fake.requests if path == "/v1/completions"]
    assert len(sent) == 2  # a request a prompt: its samples share it
    body = next(b for b in sent if b["prompt"] == [5, 6])
    asked = {k: body[k] for k in ("n", "temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "model")}
    assert asked == {
        "n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 4, "stop_token_ids": [2], "model": "m",
    }  # fmt: skip
    assert body["return_token_ids"] and body["logprobs"] == 0 and 0 <= body["seed"] < 2**62
    assert engine.generate([[5, 6]], SAMPLING, 1, [1])[0][0] == groups[0][0]
    assert engine.score([[5]], [[6, 7]]) == [[-3.0, -3.5]]


def test_what_a_server_may_lack_is_named(fake: FakeVllm) -> None:
    engine = ServerEngine(fake.url)
    for change, message in (({"token_ids": None}, "no token ids"), ({"logprobs": None}, "no log-probs")):
        fake.changes = change
        with pytest.raises(UserError, match=message):
            engine.generate([[5]], SAMPLING, 1, [0])
    fake.changes = {"finish_reason": "abort"}
    with pytest.raises(RuntimeError, match="'abort'"):
        engine.generate([[5]], SAMPLING, 1, [0])
    fake.changes = {"logprobs": {"token_logprobs": [-0.1]}}
    with pytest.raises(RuntimeError, match="1 log-probs for 2 tokens"):
        engine.generate([[5]], SAMPLING, 1, [0])
    fake.changes = {"logprobs": {"token_logprobs": [-0.1, None]}}
    with pytest.raises(NonFiniteLogprobs, match=r"2 completions .* prompt 0, sample 0, token 1"):
        engine.generate([[5], [6]], SAMPLING, 1, [0, 0])


def test_refusals_and_outages(fake: FakeVllm) -> None:
    with pytest.raises(UserError, match=r"does not serve 'x'; it serves \['m'\]"):
        ServerEngine(fake.url, "x")
    engine = ServerEngine(fake.url)
    with pytest.raises(UserError, match=r"answered 400: .*token 63 is out of vocabulary"):
        engine.generate([[63]], SAMPLING, 1, [0])
    with pytest.raises(UserError, match=r"prompt 0 has 61 tokens; .*context_length=64"):
        engine.generate([[1] * 61], SAMPLING, 1, [0])
    fake.busy = 2
    assert engine.generate([[5]], SAMPLING, 1, [0])[0][0].token_ids == (5, 2)
    fake.busy = 99
    with pytest.raises(UserError, match="answered 503"):
        engine.generate([[5]], SAMPLING, 1, [0])
    with pytest.raises(UserError, match=r"no answer .*is the server running there"):
        ServerEngine("http://127.0.0.1:9")


def test_routed_experts_are_decoded(fake: FakeVllm) -> None:
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    buffer = io.BytesIO()
    np.save(buffer, experts)
    fake.changes = {"routed_experts": base64.b64encode(buffer.getvalue()).decode()}
    got = ServerEngine(fake.url).generate([[5]], SAMPLING, 1, [0])[0][0].routed_experts
    assert got is not None and np.array_equal(got, experts)


class Sender:
    """The trainer's end of the weight-transfer API, without a GPU. `told`: the version that the server gets to know."""

    def __init__(self, told: int | None = None) -> None:
        self.told = told
        self.sent: list[tuple[str, Any]] = []

    def send(self, client: JsonClient, weights: Any, version: int) -> None:
        client.post("/start_weight_update", {})
        self.sent = list(weights)
        client.post("/update_weight_version", {"new_version": str(version if self.told is None else self.told)})


def test_a_refit_resets_the_cache_and_is_confirmed_by_the_server(fake: FakeVllm) -> None:
    sender = Sender()
    engine = ServerEngine(fake.url, sender=sender)
    engine.sleep()
    with pytest.raises(EngineStateError, match="wake"):
        engine.generate([[5]], SAMPLING, 1, [0])
    engine.refit([("w", 1.0)], 3)
    engine.wake()
    assert sender.sent == [("w", 1.0)] and engine.generate([[5]], SAMPLING, 1, [0])[0][0].weight_version == 3
    paths = [path for path, _ in fake.requests[1:-1]]
    assert paths == [
        "/pause?mode=wait", "/start_weight_update", "/update_weight_version", "/reset_prefix_cache", "/weight_info",
        "/resume",
    ]  # fmt: skip


def test_a_refit_of_a_running_server_waits_for_what_is_in_flight(fake: FakeVllm) -> None:
    ServerEngine(fake.url, sender=Sender()).refit([("w", 1.0)], 1)
    paths = [path for path, _ in fake.requests[1:]]
    assert paths[0] == "/pause?mode=wait" and paths[1] == "/start_weight_update" and paths[-1] == "/resume"
    fake.requests.clear()
    other = ServerEngine(fake.url, sender=Sender(), controls=False)  # of another rank: it only takes part in gathering
    other.sleep()
    other.refit([("w", 1.0)], 2)
    other.wake()
    assert [path for path, _ in fake.requests] == ["/v1/models", "/start_weight_update", "/update_weight_version"]


def test_completions_are_told_as_answers_come(fake: FakeVllm) -> None:
    told: dict[tuple[int, int], Any] = {}
    groups = ServerEngine(fake.url).generate(
        [[5], [6], [7]], SAMPLING, 2, [0, 1, 2], lambda i, k, c: told.update({(i, k): c})
    )
    assert told == {(i, k): c for i, group in enumerate(groups) for k, c in enumerate(group)}


def test_a_server_that_cannot_be_refitted_says_why(fake: FakeVllm) -> None:
    with pytest.raises(RefitError, match="without a weight sender"):
        ServerEngine(fake.url).refit([], 1)
    with pytest.raises(RefitError, match="serves weight version 7 after the refit to 1"):
        ServerEngine(fake.url, sender=Sender(told=7)).refit([], 1)
    fake.without = {"/start_weight_update", "/pause", "/resume"}
    engine = ServerEngine(fake.url, sender=Sender())
    engine.sleep(discard_weights=False)  # a plain server cannot be paused and need not be
    with pytest.raises(RefitError, match=r"offers no weight update \(/start_weight_update .*VLLM_SERVER_DEV_MODE=1"):
        engine.refit([], 1)
    with pytest.raises(EngineStateError, match="refit"):
        engine.wake()
