"""One engine over two gloo processes: both ranks sample the same, a refit is exact, the trainer's group lives on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTEGRATION = Path(__file__).parents[1] / "integration"
PROMPTS = [[(7 * i + 3 * j) % 320 for j in range(40 + i)] for i in range(3)]


def test_two_ranks_agree_with_one_process(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])[1:]}
    answers = {}
    for ranks in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, str(tmp_path)]
        done = subprocess.run(
            [sys.executable, *launch], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers[ranks] = [json.loads((tmp_path / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
    alone = answers[1][0]
    assert answers[2][0] == answers[2][1]
    assert alone["old"] != alone["new"]
    for key in ("old", "new", "old_again"):
        for (ids, logprobs), (want_ids, want) in zip(answers[2][0][key], alone[key], strict=True):
            assert ids == want_ids
            assert logprobs == pytest.approx(want, abs=1e-4)
    assert answers[2][0]["old_again"] == answers[2][0]["old"]
    assert answers[2][0]["unverified"] and not alone["unverified"]  # shards are reported, not assumed to be right


def work(root: Path) -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    sys.path.insert(0, str(INTEGRATION))
    from tiny_models import save_moe

    from pivotrl.config import Generation
    from pivotrl.generation.engine import Sampling
    from pivotrl.generation.vllm_engine import VllmEngine

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folders = [root / "moe0", root / "moe1"]
    if rank == 0:
        for seed, folder in enumerate(folders):
            save_moe(folder, seed)
    dist.barrier()
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    engine = VllmEngine(folders[0], Generation(max_sequences=16, tensor_parallel=ranks), "fp32", 128, 0, [])

    def answers() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        groups = engine.generate(PROMPTS, Sampling(temperature=0.7, max_new_tokens=6), 2, [1, 2, 3])
        return [(c.token_ids, c.logprobs) for group in groups for c in group]

    result: dict[str, object] = {"old": answers()}
    engine.refit(list(weights[1].items()), 1)
    result["new"] = answers()
    engine.refit(iter(weights[0].items()), 2)
    result["old_again"] = answers()
    assert engine.last_refit is not None
    result["unverified"] = engine.last_refit.unverified
    total = torch.ones(1)
    dist.all_reduce(total)  # the group that the trainer made still works
    assert total.item() == ranks
    (root / f"{ranks}-{rank}.json").write_text(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
