"""Shards that the ranks of any parallel layout leave in a distributed checkpoint are read back bit-equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.convert import megatron_to_hf
from checkpoint_tools.keys import Style
from tests.checkpoint_makers import CONFIGS, equal, model_of, read_all, save_as_ranks, tensors_of


def layouts() -> Iterator[Any]:
    for tp, pp, ep, etp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        for kind in CONFIGS:
            if "moe" in kind or ep == etp == 1:
                yield pytest.param(kind, tp, pp, ep, etp, id=f"{kind}-tp{tp}-pp{pp}-ep{ep}-etp{etp}")


@pytest.mark.parametrize(("kind", "tp", "pp", "ep", "etp"), layouts())
def test_what_ranks_of_any_layout_saved_is_read_bit_equal(
    kind: str, tp: int, pp: int, ep: int, etp: int, tmp_path: Path
) -> None:
    """Field reports A6, A7, H2."""
    alike = "first" not in kind and "hybrid" not in kind  # layers of one shape can be stacked
    style = Style("stacked" if alike and pp % 2 == 0 else "numbered", "te" if tp % 2 else "local")
    save_as_ranks(CONFIGS[kind], tmp_path / "config", tmp_path / "m", tp, ep, etp, pp, style)
    megatron_to_hf(tmp_path / "m", tmp_path / "back", config_from=tmp_path / "config", workers=1)
    assert equal(read_all(tmp_path / "back"), tensors_of(model_of(CONFIGS[kind], tmp_path / "config")))
