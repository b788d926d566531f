"""Weights to a vLLM server through vLLM's own weight-transfer API: NCCL from GPU to GPU, or files for CPU builds.

Every trainer rank makes a sender and calls it; rank 0 talks to the server, the others take part in the gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.generation.http_json import JsonClient

BUCKET_BYTES = 1 << 30
Shapes = Sequence[tuple[str, Any, tuple[int, ...]]]  # (Hugging Face name, torch dtype, shape) in the order of sending


class NcclSender:
    """Rank 0 joins an NCCL group with the server's workers and broadcasts.

    Args:
        shapes: of all weights, in the order in which `weights` yields them.
        address, port: of rank 0's rendezvous, reachable from the server.
    """

    def __init__(self, shapes: Shapes, rank: int, address: str, port: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "generation.weight_transfer=nccl: weights are sent over NCCL, which needs an NVIDIA GPU on the "
                "trainer's side; use generation.weight_transfer=file"
            )
        self._shapes, self._rank, self._address, self._port = shapes, rank, address, port
        self._engine: Any = None
        self._source: Any = None

    def send(self, client: JsonClient, weights: Iterable[tuple[str, Any]], version: int) -> None:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        if self._engine is None:
            self._source = _source(self._shapes)
            self._engine = self._join(HTTPVLLMWeightSyncClient(client.url), client)
        self._source.pairs = lambda: iter(weights)
        self._engine.send_weights()
        if self._rank == 0:
            client.post("/update_weight_version", {"new_version": str(version)})

    def _join(self, sync: Any, client: JsonClient) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        workers = int(client.get("/get_world_size")["world_size"])
        info = NCCLTrainerInitInfo(
            rank=self._rank, master_address=self._address, master_port=self._port, world_size=workers + 1
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=sync, source=self._source)


class FileSender:
    """Rank 0 writes safetensors files that the server's workers read (`file_transfer`); nothing is left of them.

    For CPU builds, and where the server is out of NCCL's reach. `folder` must be seen by both under this path.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._joined = folder.resolve(), rank, False

    def send(self, client: JsonClient, weights: Iterable[tuple[str, Any]], version: int) -> None:
        from safetensors.torch import save_file

        if self._rank:
            for _ in weights:
                pass
            return
        if not self._joined:
            client.post("/init_weight_transfer_engine", {"init_info": {}})
            self._joined = True
        self._folder.mkdir(parents=True, exist_ok=True)
        client.post("/start_weight_update", {})
        try:
            for number, bucket in enumerate(_buckets(weights)):
                path = self._folder / f"weights-{version}-{number}.safetensors"
                try:
                    save_file(bucket, path)
                    client.post("/update_weights", {"update_info": {"path": str(path)}})
                finally:
                    path.unlink(missing_ok=True)
        except BaseException:
            with suppress(UserError):  # the server ends an update that failed there by itself
                client.post("/finish_weight_update", {})
            raise
        client.post("/finish_weight_update", {"weight_version": str(version)})


def _buckets(weights: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tensors in RAM, at most `BUCKET_BYTES` at a time (a larger one goes alone)."""
    bucket: dict[str, Any] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().cpu().clone()  # tied weights share memory, which safetensors refuses
        size += tensor.nbytes
    if bucket:
        yield bucket


def _source(shapes: Shapes) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        """vLLM's view of a stream of weights; `pairs` is set anew for each refit."""

        pairs: Callable[[], Iterator[tuple[str, Any]]]

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in shapes]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return self.pairs()

    return Source()
