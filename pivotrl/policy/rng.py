"""States of the random number generators of a process, as JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def place() -> str:
    """Where this rank stands; ranks of another launch in the same place have the same random numbers."""
    at = {
        "tp": groups.get_tensor_model_parallel_rank(),
        "pp": groups.get_pipeline_model_parallel_rank(),
        "dp": groups.get_data_parallel_rank(),
        "ep": groups.get_expert_model_parallel_rank(),
        "etp": groups.get_expert_tensor_parallel_rank(),
    }
    return ",".join(f"{name}={rank}" for name, rank in at.items())


def collect() -> dict[str, Any]:
    """States of python's, numpy's and torch's generators, and of CUDA's and megatron-core's where there is a GPU."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
        states["megatron"] = {name: _text(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    return states


def restore(states: dict[str, Any]) -> None:
    """Put the generators of this process into `states` (of `collect`)."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
        get_cuda_rng_tracker().set_states({name: _tensor(text) for name, text in states["megatron"].items()})


def reseed(*parts: object) -> None:
    """For a rank that has no saved state, because the layout has changed: a seed of its own, the same every time."""
    seed = random.Random("/".join(map(str, parts))).getrandbits(31)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
