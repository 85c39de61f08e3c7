"""The page on performance: a run of one part renews that part, plots are real pictures, targets are judged rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import performance
from bench.report import NOISE_MEASURE, Result, Target, spread


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


def test_one_hiccup_of_the_machine_does_not_decide_its_noise():
    """Guards the reader's trust in the figures: slowest over fastest printed 1678 % for one turn that was held up."""
    calm = [1.0, 1.01, 1.02, 0.99, 0.98] * 3
    held_up = [*calm[:-1], 17.0]
    assert spread(calm) < 0.03
    assert spread(held_up) < 0.03
    assert spread([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]) > 0.5, "a machine that is really uneven still shows"


def test_the_page_says_how_the_noise_was_measured_also_for_results_that_were_kept():
    """Guards kept figures: the same key means the slowest turn in older results, and the middle half in newer ones."""
    machine = {"cores": 2, "memory_gb": 8, "python": "3.11", "load": [1.0], "noise": 0.05}
    result = {**_result(), "machine": machine}
    assert "of equal turns the slowest took 5% more than the fastest." in performance.text({"ticks": result}, {})
    result["machine"] = {**machine, "noise_measure": NOISE_MEASURE}
    assert "the middle half of equal turns spread over 5.0% of their median." in performance.text({"ticks": result}, {})
    assert {"noise", "noise_measure"} <= Result().as_json()["machine"].keys()
