"""Weights to a vLLM server through files, for CPU builds and where NCCL does not reach: the trainer's end.

The server's end is a backend of vLLM's weight-transfer API (`file_transfer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.generation.http_json import JsonClient

BUCKET_BYTES = 1 << 30


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
