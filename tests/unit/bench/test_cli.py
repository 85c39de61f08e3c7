"""The command `lockstep bench`: what it keeps when a part fails."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from bench import cli
from bench.report import Context, Result


def _measured(_: Context) -> Result:
    return Result(ratios={"vs_naive": 2.0})


def _broken(_: Context) -> Result:
    raise RuntimeError("the part is away")


def test_figures_of_the_other_parts_are_kept_when_one_part_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A full run takes an hour: a fault in a late part must not cost the figures of the earlier ones."""
    modules = {"bench.first": _measured, "bench.second": _broken, "bench.third": _measured}
    monkeypatch.setattr(cli, "PARTS", ("first", "second", "third"))
    monkeypatch.setattr(cli, "own_stack", nullcontext)
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(run=modules[name]))
    file = tmp_path / "bench.json"

    with pytest.raises(typer.Exit) as ended:
        cli.bench(part=None, quick=True, json_file=file, page=None)

    assert ended.value.exit_code == 1
    kept = json.loads(file.read_text())
    assert list(kept) == ["first", "third"]
    assert kept["third"]["ratios"] == {"vs_naive": 2.0}
    assert "second was not measured: the part is away" in capsys.readouterr().out
