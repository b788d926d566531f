"""Everything that must be true of a process before vLLM is imported and built: environment, patches, quiet, clean-up.

What differs between vLLM 0.32 and 0.33 is here and nowhere else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

Shapes = Sequence[tuple[str, Any, tuple[int, ...]]]  # (Hugging Face name, torch dtype, shape) in the order of sending
_SHARED_MEMORY = Path("/dev/shm")


def set_environment() -> None:
    """In process, offline, silent. What a user set for logging wins; the rest is needed for the engine to be right."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights and trainer live in this very process
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over generation.kv_cache_gib
    os.environ["HF_HUB_OFFLINE"] = "1"  # model folders are local; never wait for a network
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def import_vllm() -> Any:
    """The vllm module, patched on CPU builds. Raises ImportError if it is not installed."""
    with quiet():
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            _patch_cpu_experts()
            _patch_cpu_embedding()
    return vllm


@contextmanager
def default_group_kept() -> Iterator[None]:
    """While an engine shuts down: vLLM destroys torch's default process group, also one that the trainer made."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _patch_cpu_experts() -> None:
    """CPU builds repack expert weights at the first load only: a refit would be read in the wrong layout."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    original = Method.process_weights_after_loading
    if hasattr(original, "_pivotrl"):
        return

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        is_refit = self.moe_kernel is not None
        original(self, layer)
        if is_refit:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    process_weights_after_loading._pivotrl = True  # type: ignore[attr-defined]
    setattr(Method, "process_weights_after_loading", process_weights_after_loading)  # noqa: B010


def _patch_cpu_embedding() -> None:
    """CPU builds also keep a packed matmul copy of the input embedding, which nothing multiplies by: drop it."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding

    original = embedding.UnquantizedEmbeddingMethod.process_weights_after_loading
    if hasattr(original, "_pivotrl"):
        return

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if isinstance(layer, embedding.ParallelLMHead):
            original(self, layer)

    process_weights_after_loading._pivotrl = True  # type: ignore[attr-defined]
    setattr(embedding.UnquantizedEmbeddingMethod, "process_weights_after_loading", process_weights_after_loading)  # noqa: B010


def repack_heads(model: Any) -> None:
    """Pack output heads anew after a refit (CPU builds).

    The head keeps a packed copy for its matmul. When it is tied to the embedding a reload never visits it, and it would
    go on serving the old weights without a word.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.cpu_linear = None  # gives the old packed copy back first
            module.quant_method.process_weights_after_loading(module)


def requantises_fp8() -> bool:
    """Whether this GPU's kernels round FP8 scales to powers of two, and with them the weights, when they are loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return False
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())


def finish_broken_reload(model: Any, model_config: Any) -> None:
    """Close a reload that stopped in the middle, so that the next one starts from nothing."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def weight_source(shapes: Shapes) -> Any:
    """vLLM's view of a stream of weights, for its weight-transfer API. Set `pairs`, a function that starts the stream,
    anew for each refit.

    vLLM 0.32 calls `metadata()` and iterates the object; 0.33 reads `metadata`, which must be a cached property, and
    iterates `iter_full()`.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    metadata = [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in shapes]
    if not hasattr(WeightSource, "iter_full"):  # 0.33 refuses this class when it is defined

        class Source032(WeightSource):
            pairs: Callable[[], Iterator[tuple[str, Any]]]

            def metadata(self) -> list[Any]:
                return metadata

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                return self.pairs()

        return Source032()

    class Source033(WeightSource):
        pairs: Callable[[], Iterator[tuple[str, Any]]]

        @cached_property
        def metadata(self) -> list[Any]:
            return metadata

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            return self.pairs()

    return Source033()


def remove_stale_shared_memory() -> None:
    """Unlink tensor-parallel segments that a crashed run left: their names are fixed and would stop this run.

    Segments that a live process maps are kept (building the engine then fails with vLLM's own error).
    """
    segments = list(_SHARED_MEMORY.glob("-tp:*cpushm*")) if _SHARED_MEMORY.is_dir() else []
    for segment in segments:
        if not _is_mapped(segment):
            segment.unlink(missing_ok=True)


def _is_mapped(segment: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(segment) in maps.read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:  # the process ended, or is not ours to look into
            continue
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Keep stdout and stderr (C++ included) clean of start-up chatter; show all of it if the block raises."""
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper() != "ERROR":  # someone is looking for it
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as captured, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(captured.fileno(), 1)
        os.dup2(captured.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for target, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, target)
                os.close(copy)
            if failed:
                captured.seek(0)
                os.write(2, captured.read())
