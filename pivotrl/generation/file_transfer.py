"""The server's end of `server_files.FileSender`: a backend of vLLM's weight-transfer API for any build, CPU included.

A server loads it with `--worker-extension-cls pivotrl.generation.file_transfer.Extension`, which imports this module in
every worker before its model is made, and uses it with `--weight-transfer-config '{"backend": "file"}'`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pivotrl.generation import vllm_setup

vllm_setup.import_vllm()  # with its patches: CPU builds would go on serving what they packed at the first load

from safetensors.torch import load_file  # noqa: E402
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "file"


class Extension:
    """Adds nothing to a worker: naming it makes the worker import this module."""


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str  # a safetensors file of whole tensors under Hugging Face names, on a disk that the server sees


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    init_info_cls, update_info_cls = FileInit, FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(iter(load_file(update_info.path).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        vllm_setup.repack_heads(self.model)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
