from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_profile import make, turns, use

from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.profiling.parquet import export
from pivotrl.profiling.stage import run_profile


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pivotrl\[parquet\]"):
        export(tmp_path)


def test_every_value_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(UserError, match="no finished profile"):
        export(tmp_path)
    use(monkeypatch, tmp_path)
    run_profile(make(tmp_path, turns(6)), tmp_path)
    monkeypatch.setattr("pivotrl.profiling.parquet.ROWS_PER_GROUP", 7)
    written = export(tmp_path)
    directory = tmp_path / "profile"
    for name in ("turns", "rollouts"):
        rows = list(read_jsonl(directory / f"{name}.jsonl"))
        back = parquet.read_table(directory / f"{name}.parquet").to_pylist()
        assert len(rows) == len(back) == written[name]
        for row, again in zip(rows, back, strict=True):
            for key in ("action", "details"):
                if key in row:
                    again[key] = json.loads(again[key])
            if "logprobs" in row:
                assert again.pop("logprobs") == pytest.approx(row.pop("logprobs"), rel=1e-6)
            assert row == again
    write_jsonl(directory / "turns.jsonl", [{"turn_id": "a", "novel": 1}])
    with pytest.raises(UserError, match="without a Parquet column: novel"):
        export(tmp_path)
