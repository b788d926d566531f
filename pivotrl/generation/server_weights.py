"""Weights to a vLLM server through vLLM's own weight-transfer API (NCCL broadcast from the trainer's rank 0)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pivotrl.errors import UserError
from pivotrl.generation import vllm_setup
from pivotrl.generation.http_json import JsonClient


class NcclSender:
    """Made on every trainer rank; rank 0 joins an NCCL group with the server's workers and broadcasts, the others only
    take part in the gathering.

    Args:
        shapes: of all weights, in the order in which `weights` yields them.
        address, port: of rank 0's rendezvous, reachable from the server.
    """

    def __init__(self, shapes: vllm_setup.Shapes, rank: int, address: str, port: int) -> None:
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
            self._source = vllm_setup.weight_source(self._shapes)
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
