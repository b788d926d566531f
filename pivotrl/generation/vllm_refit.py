"""A refit of the vLLM engine of this process: check, load, verify, all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pivotrl.config import Generation
from pivotrl.errors import UserError
from pivotrl.generation.direct_load import DirectLoader
from pivotrl.generation.engine import RefitError
from pivotrl.generation.quantised import Quantiser
from pivotrl.generation.refit_check import ExpectedWeights, RefitCheck, is_scale, non_finite
from pivotrl.generation.refit_verify import RefitReport, RefitVerifier
from pivotrl.generation.served import RankShards, content, full_shape, served_parameters
from pivotrl.models import block_fp8
from pivotrl.refit.execute import Shard

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "Tensor | Shard"]]


class VllmRefit:
    """Loads weights into one vLLM engine, time after time."""

    def __init__(self, llm: Any, setup: ModuleType, folder: Path, generation: Generation, rank: int) -> None:
        self._llm, self._setup, self._generation = llm, setup, generation
        self._model_config = llm.llm_engine.model_config
        expected = ExpectedWeights.from_folder(folder)
        self._shards = RankShards(folder, generation.tensor_parallel, rank, generation.expert_parallel)
        elsewhere = {n for n in expected.shapes if n.removesuffix(block_fp8.SCALE) in self._shards.elsewhere}
        self._expected = replace(expected, elsewhere=frozenset(elsewhere))
        self._quantiser = Quantiser.of(folder, self._expected.shapes)
        if self._quantiser is not None:
            self._shards.boxes.update(self._quantiser.scale_boxes(self._shards.boxes, self._expected.shapes))
        self._direct: DirectLoader | None = llm.apply_model(DirectLoader.of)[0]
        self._done = 0

    def run(self, weights: Weights, version: int) -> RefitReport | None:
        """Load all of `weights`; gives the report of what was verified, or None if this refit is not to be verified.

        Raises RefitError naming the weight, on every rank if it fails on one.
        """
        error: BaseException | None = None
        report = None
        try:
            report = self._run(weights, version)
        except RefitError as raised:
            error = raised
            for _ in weights:  # the stream is a collective: other ranks are still in it
                pass
        self._agree(error)
        self._done += 1
        return report

    def _run(self, weights: Weights, version: int) -> RefitReport | None:
        if isinstance(weights, list | tuple):  # checked whole before anything is loaded
            check = RefitCheck(self._expected)
            for name, tensor in weights:
                check.add(name, full_shape(tensor), finite=True)
                if self._quantiser is not None and self._quantiser.quantises(name, content(tensor)):
                    check.add(scale := name + block_fp8.SCALE, self._expected.shapes[scale], finite=True)
            check.finish()
        verifier = None
        if self._is_verified():
            verifier = RefitVerifier(self._expected.shapes, self._model_config.dtype, version)
        parts = self._checked(iter(weights), verifier)
        if self._direct is not None:
            self._load_directly(self._direct, parts)
        else:
            self._reload(parts)
        if verifier is None:
            return None
        report: RefitReport = self._llm.apply_model(verifier.compare)[0]
        if report.non_finite:
            raise non_finite(report.non_finite[0])
        if report.different:
            raise RefitError(
                f"refit: after loading, the engine serves other values than were sent for {len(report.different)} "
                "weights: " + ", ".join(report.different[:8])
            )
        return report

    def _is_verified(self) -> bool:
        mode = self._generation.verify_refit
        if mode not in ("always", "every_n", "off"):
            raise UserError(f"generation.verify_refit={mode!r}: use 'always', 'every_n' or 'off'")
        return mode == "always" or (mode == "every_n" and self._done % self._generation.verify_every == 0)

    def _checked(
        self, weights: Iterator[tuple[str, Tensor | Shard]], verifier: RefitVerifier | None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's part) of each weight, checked. Raises RefitError at the end if some are missing."""
        check = RefitCheck(self._expected)
        # the verifier multiplies every value of these, by which a NaN or infinity shows
        multiplied = self._direct.packed if self._direct is not None and verifier is not None else frozenset()
        for name, sent in weights:
            check.add(name, full_shape(sent), finite=True)
            if name in self._expected.elsewhere:
                continue
            part = self._shards.part(name, sent)
            if name not in multiplied and not is_finite(part):
                raise non_finite(name)
            if self._quantiser is None or not self._quantiser.quantises(name, part):
                yield self._passed(name, part, verifier)
                continue
            for served, values in self._quantiser.split(name, part):
                if served != name:
                    check.add(served, self._expected.shapes[served], finite=is_finite(values))
                yield self._passed(served, values, verifier)
        check.finish()

    def _passed(self, name: str, part: Tensor, verifier: RefitVerifier | None) -> tuple[str, Tensor]:
        if is_scale(name) and not bool((part > 0).all()):
            raise RefitError(f"refit: scale {name!r} is not positive; what it scales would be served as nothing")
        if verifier is not None and name not in self._shards.cut_by_engine:
            verifier.sent(name, part)
        return name, part

    @torch.no_grad()
    def _load_directly(self, loader: DirectLoader, parts: Iterator[tuple[str, Tensor]]) -> None:
        loader.start()
        for name, part in parts:
            loader.load(name, part)
        loader.finish()
        self._llm.apply_model(self._setup.repack_heads)

    def _reload(self, parts: Iterator[tuple[str, Tensor]]) -> None:
        """vLLM's layerwise reload, which takes whole tensors and cuts out what this rank serves."""
        latest = "the first weight"

        def whole() -> Iterator[tuple[str, Tensor]]:
            nonlocal latest
            for name, part in parts:
                latest = repr(name)
                yield name, _surrounded(part, self._shards.box(name), self._expected.shapes[name])

        try:
            with self._setup.quiet():
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": whole()})
                self._llm.apply_model(self._setup.repack_heads)
        except BaseException as error:
            with self._setup.quiet():
                self._llm.apply_model(lambda model: self._setup.finish_broken_reload(model, self._model_config))
            if isinstance(error, RefitError) or not isinstance(error, Exception):
                raise
            # the other ranks must hear of it too, so it is no other kind of error
            raise RefitError(f"refit: vLLM could not load {latest}: {type(error).__name__}: {error}") from error
        if self._generation.tensor_parallel > 1:
            self._llm.apply_model(_refuse_foreign_parts)

    def _agree(self, error: BaseException | None) -> None:
        """All ranks raise if one has to: none may go on alone with weights that another refused."""
        if self._generation.tensor_parallel > 1 or (dist.is_initialized() and dist.get_world_size() > 1):
            messages: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(messages, None if error is None else str(error))
            failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
            if failed and error is None:
                raise RefitError(failed[0])
        if error is not None:
            raise error


def _surrounded(part: Tensor, box: Any, shape: tuple[int, ...]) -> Tensor:
    """A whole tensor that holds `part` in its place and NaN elsewhere, so that use of any other place is seen."""
    if box is None or tuple(part.shape) == shape:
        return part
    whole = part.new_full(shape, math.nan)
    whole[tuple(slice(start, stop) for start, stop in box)] = part
    return whole


def _refuse_foreign_parts(model: Any) -> None:
    for served in served_parameters(model):
        if served.tensor.is_floating_point() and served.tensor.numel() and not is_finite(served.tensor):
            raise RefitError(f"refit: the engine took another part of {served.name} than the plan sends to this rank")


def is_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite. One pass: either would show in the sum."""
    values = tensor.detach()
    if values.dtype == block_fp8.FP8:
        return block_fp8.is_finite(values)
    if math.isfinite(values.sum().item()):  # without dtype=: ten times faster for bfloat16, and float32 inside as well
        return True
    return bool(values.isfinite().all().item())  # finite values may overflow a sum
