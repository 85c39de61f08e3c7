"""The page on performance: a run of one part renews that part, plots are real pictures, targets are judged rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import performance
from bench.report import Result, Target


def _result() -> dict[str, Any]:
    result = Result()
    result.ratio("fast", 2.0, Target(1.5))
    result.ratio("slow", 2.0, Target(2.5))
    result.ratio("growth", 1.0, Target(1.25, at_least=False))
    result.ratio("printed", 7.0)
    result.samples |= {
        "finalize_seconds_at_100": [0.5, 0.4, 0.6],
        "finalize_seconds_at_10": [0.4],
        "original_seconds_at_100": [1.0],
        "  of that: queue, s": [0.2],
    }
    return result.as_json()


def test_a_share_of_one_is_exactly_the_target_in_both_directions():
    result = _result()
    shares = {name: performance.share_of_target(name, result) for name in result["ratios"]}
    assert shares == {"fast": 2.0 / 1.5, "slow": 0.8, "growth": 1.25, "printed": None}


def test_growth_and_portions_are_read_from_the_names_of_samples():
    result = _result()
    assert performance.growth(result) == {"finalize": [(10, 0.4), (100, 0.5)], "original": [(100, 1.0)]}
    assert performance.portions(result) == {"queue": 0.2}


def test_a_run_of_one_part_renews_that_part_and_keeps_the_others(tmp_path: Path):
    page = tmp_path / "performance.md"
    performance.write(page, {"ticks": _result()})
    made = performance.write(page, {"readiness": {**_result(), "samples": {}}})
    words = page.read_text()
    assert words.index("## readiness") < words.index("## ticks")
    assert "| `slow` | 2.00 | at least 2.5 | missed |" in words
    assert "| `growth` | 1.00 | at most 1.25 | met |" in words
    pictures = [one for one in made if one.suffix == ".png"]
    assert len(pictures) == 4
    assert all(one.read_bytes().startswith(b"\x89PNG") and f"pictures/{one.name}" in words for one in pictures)
