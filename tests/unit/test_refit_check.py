"""Names, shapes and numbers of a refit (field reports A9, A10, A6) and what a model folder expects."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.errors import UserError
from pivotrl.generation.engine import RefitError
from pivotrl.generation.refit_check import (
    EMBEDDING,
    HEAD,
    ExpectedWeights,
    RefitCheck,
    is_scale,
    read_safetensors_shapes,
)

SHAPES = {EMBEDDING: (8, 4), "model.layers.0.mlp.down_proj.weight": (4, 6), "model.norm.weight": (4,)}


def send(expected: ExpectedWeights, sent: list[tuple[str, tuple[int, ...]]]) -> None:
    check = RefitCheck(expected)
    for name, shape in sent:
        check.add(name, shape, finite=True)
    check.finish()


def test_complete_refit_passes_in_any_order() -> None:
    send(ExpectedWeights(SHAPES), list(SHAPES.items()))
    send(ExpectedWeights(SHAPES), list(SHAPES.items())[::-1])


@given(st.sets(st.sampled_from(sorted(SHAPES)), min_size=1))
def test_every_missing_name_is_listed(dropped: set[str]) -> None:
    with pytest.raises(RefitError) as error:
        send(ExpectedWeights(SHAPES), [(n, s) for n, s in SHAPES.items() if n not in dropped])
    assert f"{len(dropped)} of 3" in str(error.value)
    assert all((name in str(error.value)) == (name in dropped) for name in SHAPES)


def test_a_shard_is_refused_with_both_shapes() -> None:
    with pytest.raises(RefitError, match=r"down_proj.weight' has shape \(4, 3\).*expects \(4, 6\)"):
        send(ExpectedWeights(SHAPES), [("model.layers.0.mlp.down_proj.weight", (4, 3))])


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RefitError, match=r"no weight 'model.norm.wieght'; did you mean 'model.norm.weight'"):
        send(ExpectedWeights(SHAPES), [("model.norm.wieght", (4,))])


def test_twice_and_not_finite_are_refused() -> None:
    with pytest.raises(RefitError, match=r"'model.norm.weight' was sent twice"):
        send(ExpectedWeights(SHAPES), [("model.norm.weight", (4,))] * 2)
    with pytest.raises(RefitError, match=r"'model.norm.weight' holds NaN"):
        RefitCheck(ExpectedWeights(SHAPES)).add("model.norm.weight", (4,), finite=False)


def write_folder(folder: Path, shapes: dict[str, tuple[int, ...]], **config: object) -> Path:
    header = {"__metadata__": {"format": "pt"}}
    header |= {n: {"dtype": "F32", "shape": list(s), "data_offsets": [0, 0]} for n, s in shapes.items()}  # type: ignore[misc]
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("head_in_file", [True, False])
def test_tied_head_may_be_sent_or_left_out(tmp_path: Path, head_in_file: bool) -> None:
    shapes = SHAPES | ({HEAD: (8, 4)} if head_in_file else {})
    expected = ExpectedWeights.from_folder(write_folder(tmp_path, shapes, tie_word_embeddings=True))
    send(expected, list(SHAPES.items()))
    send(expected, [*SHAPES.items(), (HEAD, (8, 4))])
    with pytest.raises(RefitError, match="expects"):
        send(expected, [(HEAD, (9, 4))])


def test_untied_head_must_be_sent(tmp_path: Path) -> None:
    expected = ExpectedWeights.from_folder(write_folder(tmp_path, SHAPES | {HEAD: (8, 4)}, tie_word_embeddings=False))
    with pytest.raises(RefitError, match=f"1 of 4 weights were not sent: {HEAD}"):
        send(expected, list(SHAPES.items()))


def test_damaged_or_absent_weights_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="safetensors"):
        ExpectedWeights.from_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    for content in (b"", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\xff" * 64, struct.pack("<Q", 50) + b"{"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors"):
            read_safetensors_shapes(path)


def test_scales_are_known_by_name() -> None:
    names = ["q_proj.weight_scale_inv", "w13_weight_scale", "q_proj.weight", "scale_proj.weight", "k_scale"]
    assert [is_scale(name) for name in names] == [True, True, False, False, True]
