"""Tree attention and the target head against plain, dense formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pivotrl.config import Parallel
from pivotrl.policy import distributed, head, tree_attention
from pivotrl.policy.prefix_tree import TokenSequence, build_tree
from pivotrl.policy.tree_attention import _TreeAttention, rope_tables, tree_blocks


def dense(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor, scale: float) -> Tensor:
    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return (x * cosine[:, None] + torch.cat([-b, a], -1) * sine[:, None]).transpose(0, 1)[None]

    out = F.scaled_dot_product_attention(
        rotated(q), rotated(k), v.transpose(0, 1)[None], attn_mask=visible, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("block", [2**20, 64])
def test_tree_attention_equals_masked_attention(
    dtype: torch.dtype, tolerance: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three levels of segments, leaves of unequal length in one group, padding rows, heads sharing keys."""
    monkeypatch.setattr(tree_attention, "BLOCK_ELEMENTS", block)
    torch.manual_seed(0)
    sequences = [TokenSequence.of([1] * 5 + [10 + p] * 3, [20 + g] * (4 + g)) for p in range(3) for g in range(4)]
    tree = build_tree([*sequences, TokenSequence.of([1] * 5, [3])], multiple_of=8)
    n = len(tree.token_ids)
    rows, ends = torch.arange(n), torch.from_numpy(tree.subtree_end)
    visible = (rows[None] <= rows[:, None]) & (rows[:, None] < ends[None])
    inputs = [torch.randn(n, h, 16).to(dtype) for h in (4, 2, 2)]
    blocks = tree_blocks(tree.segments, torch.device("cpu"))
    assert any(not g.valid.all() for g in blocks.groups)
    assert len(blocks.descendants) > 1
    results = []
    for fused in (True, False):
        q, k, v = (x.clone().to(dtype if fused else torch.float32).requires_grad_() for x in inputs)
        tables = rope_tables(torch.from_numpy(tree.position_ids), 16, 1e4, q.dtype)
        out = _TreeAttention.apply(q, k, v, *tables, blocks, 0.25) if fused else dense(q, k, v, *tables, visible, 0.25)
        (out.float() * torch.linspace(-1, 1, 16)).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunked_targets_equal_log_softmax(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report K3: any chunk size gives the same, and no more rows of scores than a chunk exist at a time."""
    distributed.initialise(Parallel())
    torch.manual_seed(0)
    vocabulary, hidden_size, temperature = 50, 16, 0.6
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", rows * vocabulary)
    seen: list[int] = []
    original = head.scores
    monkeypatch.setattr(head, "scores", lambda h, *rest: (seen.append(len(h)), original(h, *rest))[1])
    hidden, weight = torch.randn(30, hidden_size), torch.randn(vocabulary, hidden_size)
    pair_row = torch.tensor([0, 0, 0, 3, *range(5, 30), 29])
    pair_token = torch.randint(0, vocabulary, pair_row.shape)
    a, b = torch.randn(len(pair_row)), torch.randn(30)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            logprobs, entropy = head.target_logprobs(h, w, pair_row, pair_token, temperature, None)
        else:
            full = (h @ w.t() / temperature).log_softmax(-1)
            logprobs, entropy = full[pair_row, pair_token], -(full.exp() * full).sum(-1)
        ((logprobs * a).sum() + (entropy * b).sum()).backward()
        results.append([logprobs, entropy, h.grad, w.grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
    assert max(seen) <= rows
