"""The recurrence of Mamba-2 over a tree against itself, row by row, over each sequence alone (float64)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pivotrl.policy.prefix_tree import TokenSequence, build_tree
from pivotrl.policy.tree_scan import ScanPlan, gated_norm, parents_of, tree_conv, tree_scan

HEADS, GROUPS, P, N, KERNEL = 4, 2, 3, 5, 4
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)


def values(rows: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "x": normal(rows, HEADS, P),
        "dt": normal(rows, HEADS).exp(),
        "decay": -normal(HEADS).exp(),
        "b": normal(rows, GROUPS, N),
        "c": normal(rows, GROUPS, N),
    }


def recurrence(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One sequence, row by row."""
    state, out = torch.zeros(HEADS, P, N, dtype=x.dtype), []
    for t in range(len(x)):
        keys, queries = (v[t].repeat_interleave(HEADS // GROUPS, 0) for v in (b, c))
        added = (dt[t, :, None] * x[t])[:, :, None] * keys[:, None]
        state = (dt[t] * decay).exp()[:, None, None] * state + added
        out.append((state @ queries[:, :, None])[..., 0])
    return torch.stack(out)


def paths(parent: list[int]) -> list[list[int]]:
    """The rows from the root to each leaf."""
    found = []
    for leaf in sorted(set(range(len(parent))) - set(parent)):
        path, row = [], leaf
        while row >= 0:
            path.append(row)
            row = parent[row]
        found.append(path[::-1])
    return found


def tree_of(sequences: list[list[int]], padded: int = 1):  # type: ignore[no-untyped-def]
    return build_tree([TokenSequence(tuple(ids), ()) for ids in sequences], None, padded)


@given(SEQUENCES, st.integers(1, 6), st.sampled_from([1, 8]))
def test_every_path_is_scanned_as_if_it_were_alone(sequences: list[list[int]], longest: int, padded: int) -> None:
    tree = tree_of(sequences, padded)
    plan = ScanPlan.of(tree, longest, KERNEL, torch.device("cpu"))
    given_values = {k: v.requires_grad_() for k, v in values(len(tree.token_ids)).items()}
    out = tree_scan(**given_values, plan=plan)
    assert plan.rows.shape[1] <= longest and sum(plan.sizes) == len(plan.rows)
    expected = torch.zeros_like(out)
    for path in paths(parents_of(tree).tolist()):
        rows = torch.tensor(path)
        alone = recurrence(*(v if k == "decay" else v[rows] for k, v in given_values.items()))
        expected = expected.index_put((rows,), alone)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    inputs = list(given_values.values())
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for ours, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@given(SEQUENCES, st.integers(1, 5), st.booleans())
def test_the_convolution_follows_each_path(sequences: list[list[int]], kernel: int, biased: bool) -> None:
    tree = tree_of(sequences)
    plan = ScanPlan.of(tree, 4, kernel, torch.device("cpu"))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(len(tree.token_ids), 6, generator=g, dtype=torch.float64)
    weight = torch.randn(6, 1, kernel, generator=g, dtype=torch.float64)
    bias = torch.randn(6, generator=g, dtype=torch.float64) if biased else None
    out = tree_conv(x, weight, bias, plan)
    for path in paths(parents_of(tree).tolist()):
        alone = torch.nn.functional.conv1d(x[path].T[None], weight, bias, padding=kernel - 1, groups=6)
        torch.testing.assert_close(out[path], alone[0, :, : len(path)].T)


def test_siblings_share_what_is_above_them_and_nothing_else() -> None:
    tree = tree_of([[0] * 9 + [1, 2], [0] * 9 + [2, 1], [0] * 4 + [1]])
    plan = ScanPlan.of(tree, 4, KERNEL, torch.device("cpu"))
    given_values = values(len(tree.token_ids))
    before = tree_scan(**given_values, plan=plan)
    row = next(r for r in range(len(tree.token_ids)) if tree.token_ids[r] == 1 and tree.position_ids[r] == 9)
    given_values["x"][row] += 1
    changed = (tree_scan(**given_values, plan=plan) != before).any(-1).any(-1)
    assert changed.nonzero()[:, 0].tolist() == list(range(row, int(tree.subtree_end[row])))


def test_a_long_decay_neither_overflows_nor_loses_gradients() -> None:
    tree = tree_of([[0] * 300])
    plan = ScanPlan.of(tree, 128, KERNEL, torch.device("cpu"))
    given_values = {k: v.float() for k, v in values(300).items()}
    given_values["decay"] = given_values["decay"] * 1e3
    inputs = [v.requires_grad_() for v in given_values.values()]
    out = tree_scan(*inputs, plan)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_is_over_each_group(groups: int) -> None:
    g = torch.Generator().manual_seed(2)
    x, gate, weight = torch.randn(5, 12, generator=g), torch.randn(5, 12, generator=g), torch.randn(12, generator=g)
    gated = (x * torch.nn.functional.silu(gate)).view(5, groups, -1)
    expected = torch.nn.functional.rms_norm(gated, gated.shape[-1:], eps=1e-5).view(5, 12) * weight
    torch.testing.assert_close(gated_norm(x, gate, weight, groups, 1e-5), expected)
