"""The scan of Mamba layers on a GPU against the same on CPU."""

from __future__ import annotations

import pytest
import torch

from pivotrl.policy.prefix_tree import build_tree
from pivotrl.policy.tree_scan import ScanPlan, tree_scan
from tests.unit.test_prefix_tree import SHAPES
from tests.unit.test_tree_scan import values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("shape", ["200 branches", "deep"])
def test_scan_and_gradients_are_those_of_the_cpu(shape: str) -> None:
    tree = build_tree(SHAPES[shape])
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        inputs = {k: v.to(device).requires_grad_() for k, v in values(len(tree.token_ids)).items()}
        out = tree_scan(**inputs, plan=ScanPlan.of(tree, 64, 4, device))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-9, atol=1e-9)  # float64
