"""The compiled FlexAttention path and the policy on a GPU, against the dense formula and Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pivotrl.policy.prefix_tree import TokenSequence, build_tree, split_rows
from tests.integration.test_tree_attention import LEVELS, SCALE, dense
from tests.unit.test_prefix_tree import SHAPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 5e-2)])  # TF32 products
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_attention_equals_masked_attention(dtype: torch.dtype, tolerance: float, ranks: int) -> None:
    from pivotrl.models.rope import Rope
    from pivotrl.policy.rope import rope_tables
    from pivotrl.policy.tree_flex import flex_tree_attention, tree_mask

    torch.manual_seed(0)
    for sequences in (LEVELS, SHAPES["200 branches"], SHAPES["deep"]):  # sizes differ: dynamic shapes
        tree = build_tree(sequences, multiple_of=16 * ranks)
        inputs = [torch.randn(len(tree.token_ids), h, 64, device="cuda").to(dtype) for h in (4, 2, 2)]
        positions = torch.from_numpy(tree.position_ids).cuda()
        results = []
        for compiled in (True, False):
            q, k, v = (x.clone().to(dtype if compiled else torch.float32).requires_grad_() for x in inputs)
            tables = rope_tables(positions, 64, Rope(1e4), q.dtype)
            out = torch.zeros_like(q) if compiled else dense(q, k, v, tables, tree)
            for rows in split_rows(tree.position_ids, ranks) if compiled else []:
                own = tuple(t[torch.from_numpy(rows).cuda()] for t in tables)
                mask = tree_mask(tree, rows, positions.device)
                index = torch.from_numpy(rows).cuda()
                out = out.index_copy(0, index, flex_tree_attention(q[index], k, v, own, tables, mask, SCALE))
            (out.float() * torch.linspace(-1, 1, 64, device="cuda")).sum().backward()
            results.append([out, q.grad, k.grad, v.grad])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def test_policy_on_a_gpu_equals_hugging_face(tmp_path: Path) -> None:
    from pivotrl.config import Optimizer, Parallel, Precision
    from pivotrl.policy.policy import MegatronPolicy
    from tests.tiny_models import save_tiny

    model = save_tiny("llama", tmp_path / "llama", head_dim=64)
    sequences = [TokenSequence.of([1, 2, 3, 4], [5 + g, 6, 7]) for g in range(4)]
    policy = MegatronPolicy.load(
        tmp_path / "llama", Parallel(), Precision(policy="bf16"), Optimizer(1e-2), 64, 10, seed=0
    )
    for got, s in zip(policy.logprobs(sequences, 1.0), sequences, strict=True):
        scores = model(torch.tensor([s.token_ids])).logits[0].log_softmax(-1)
        wanted = torch.stack([scores[t - 1, s.token_ids[t]] for t in s.targets])
        torch.testing.assert_close(got, wanted, atol=0.3, rtol=0)
    losses = [
        policy.train_step(sequences, lambda logprobs, *_: (-logprobs.sum() / 12, {}), 1.0)["loss"] for _ in range(6)
    ]
    assert losses[-1] < 0.7 * losses[0]
