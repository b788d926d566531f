"""Seconds of a refit of SmolLM2-135M (checked, loaded, repacked, verified) against a memcpy of the same bytes."""

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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor.to(device, dtype, copy=True) for file in files for name, tensor in load_file(file).items()}
    for name in [n for n in weights if n.endswith("gate_proj.weight")]:  # as in the trainer's memory: one linear_fc1
        halves = (name, name.replace("gate_proj", "up_proj"))
        weights |= zip(halves, torch.cat([weights[n] for n in halves]).chunk(2), strict=True)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    generation = Generation()
    engine = VllmEngine(folder, generation, options.dtype, 1024, 0, [])
    version = itertools.count(1)

    def refit(mode: str) -> None:
        generation.verify_refit = mode
        engine.refit(iter(weights.items()), next(version))
        _finish()

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)
        _finish()

    def _finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = interleave(
        {"verified": lambda: refit("always"), "off": lambda: refit("off"), "copy": copy}, options.repeats
    )
    engine.close()
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values()) / 1e6
    verified, plain, memcpy = (median(seconds[name]) for name in ("verified", "off", "copy"))
    every = generation.verify_every
    result = Comparison(
        benchmark="refit",
        measured=f"{options.model}, {options.dtype}, {len(weights)} tensors, {megabytes:.0f} MB, verify_refit=every_n",
        unit="seconds",
        ours=plain + (verified - plain) / every,
        theirs=memcpy,
        theirs_is="memcpy of the same bytes",
        better="lower",
        details={
            "megabytes": round(megabytes, 1),
            "seconds_verified": round(verified, 4),
            "seconds_not_verified": round(plain, 4),
            "ratio_not_verified": round(plain / memcpy, 2),
            "ratio_always_verified": round(verified / memcpy, 2),
            "verify_every": every,
            "repeats": options.repeats,
        },
    )
    show(result, as_json=options.json)


if __name__ == "__main__":
    main()
