"""Seconds of a refit of SmolLM2-135M (checked, verified, repacked) against a memcpy of the same bytes."""

from __future__ import annotations

from benchmarks.common import Comparison, interleave, median, parser, show


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="builtin:smollm2-135m")
    arguments.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options = arguments.parse_args()

    import itertools

    import torch
    from safetensors.torch import load_file

    from pivotrl.config import Generation
    from pivotrl.generation.vllm_engine import VllmEngine
    from pivotrl.models.builtin import resolve_model

    folder = resolve_model(options.model)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor.to(dtype, copy=True) for file in files for name, tensor in load_file(file).items()}
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    engine = VllmEngine(folder, Generation(), options.dtype, 1024, 0, [])
    version = itertools.count(1)

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    seconds = interleave(
        {"refit": lambda: engine.refit(iter(weights.items()), next(version)), "copy": copy}, options.repeats
    )
    engine.close()
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values()) / 1e6
    result = Comparison(
        benchmark="refit",
        measured=f"{options.model}, {options.dtype}, {len(weights)} tensors, {megabytes:.0f} MB",
        unit="seconds",
        ours=median(seconds["refit"]),
        theirs=median(seconds["copy"]),
        theirs_is="memcpy of the same bytes",
        better="lower",
        details={"megabytes": round(megabytes, 1), "repeats": options.repeats},
    )
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
