"""The page on performance and its plots, made from the results of benchmark runs.

What belongs here: how results are kept beside the page, drawn and written down. What does not: measuring. The results
are one JSON file beside the page, so that a run of one part renews that part and keeps the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import NOISE_MEASURE, PARTS, median

_WIDTH = 7.5
_OURS, _THEIRS = "#1f5f8b", "#b8b8b8"
_HISTORY = re.compile(r"^(finalize|original)_seconds_at_(\d+)$")
_PORTION = "  of that: "


def write(page: Path, results: dict[str, Any]) -> list[Path]:
    """Renew the results beside the page, the plots and the page itself; return the files that were written."""
    kept_file = page.with_suffix(".json")
    kept = json.loads(kept_file.read_text()) if kept_file.exists() else {}
    kept |= results
    page.parent.mkdir(parents=True, exist_ok=True)
    kept_file.write_text(json.dumps(kept, indent=2) + "\n")
    pictures = page.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    drawn = {part: list(_draw(part, kept[part], pictures)) for part in PARTS if part in kept}
    page.write_text(text(kept, {part: [one.name for one in files] for part, files in drawn.items()}))
    return [page, kept_file, *(one for files in drawn.values() for one in files)]


def text(results: dict[str, Any], pictures: dict[str, list[str]]) -> str:
    """The page. It says nothing that is not in the results."""
    lines = [
        "# Performance",
        "",
        "Ratios against baselines of the same run, never bare seconds: a ratio holds on another machine, a second does",
        "not. This page and its plots are written by `lockstep bench --page docs/performance.md`, or for one part by",
        "`lockstep bench windows --page docs/performance.md`; the figures are in [performance.json](performance.json).",
        "What a ratio means is said in `bench/<part>.py` and on the page of its pipeline.",
    ]
    for part in PARTS:
        if part in results:
            lines += ["", f"## {part}", "", *_section(results[part])]
            lines += [f"\n![{part}](pictures/{name})" for name in pictures.get(part, [])]
    return "\n".join(lines) + "\n"


def share_of_target(name: str, result: dict[str, Any]) -> float | None:
    """How far a ratio reaches its target: 1 is exactly there, more is better. None without a target."""
    target = result["targets"].get(name)
    if target is None:
        return None
    value = max(result["ratios"][name], 1e-9)
    return float(value / target if result["directions"][name] == "at least" else target / value)


def growth(result: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Median seconds by length of history, for samples that are named that way."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, samples in result["samples"].items():
        if match := _HISTORY.match(name):
            found.setdefault(match[1], []).append((int(match[2]), median(samples)))
    return {who: sorted(points) for who, points in found.items()}


def portions(result: dict[str, Any]) -> dict[str, float]:
    """Where the time goes, for samples that are portions of another."""
    return {
        name.removeprefix(_PORTION).removesuffix(", s"): median(samples)
        for name, samples in result["samples"].items()
        if name.startswith(_PORTION) and samples
    }


def _section(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    yield (
        f"{machine['cores']} cores, {machine['memory_gb']} GB, Python {machine['python']}; load {machine['load'][0]} at"
        f" the end{_noise(machine)}."
    )
    yield from ("", "| ratio | value | target | |", "|---|---:|---:|---|")
    for name, value in result["ratios"].items():
        target = result["targets"].get(name)
        bound = "" if target is None else f"{result['directions'][name]} {target:g}"
        share = share_of_target(name, result)
        yield f"| `{name}` | {value:,.2f} | {bound} | {'' if share is None else 'met' if share >= 1 else 'missed'} |"
    yield from ("", "| sample | median | from | to | of |", "|---|---:|---:|---:|---:|")
    for name, samples in result["samples"].items():
        if samples:
            low, high = min(samples), max(samples)
            yield f"| {name.strip()} | {median(samples):,.3f} | {low:,.3f} | {high:,.3f} | {len(samples)} |"


def _noise(machine: dict[str, Any]) -> str:
    if "noise" not in machine:
        return ""
    if machine.get("noise_measure") != NOISE_MEASURE:  # kept from a run that measured it in the older way
        return f", of equal turns the slowest took {machine['noise']:.0%} more than the fastest"
    return f", the middle half of equal turns spread over {machine['noise']:.1%} of their median"


def _draw(part: str, result: dict[str, Any], folder: Path) -> Iterator[Path]:
    from matplotlib.figure import Figure  # heavy; without pyplot no display is asked for

    shares = {name: share for name in result["ratios"] if (share := share_of_target(name, result)) is not None}
    if shares:
        figure = Figure(figsize=(_WIDTH, 0.8 + 0.32 * len(shares)), layout="constrained")
        axes = figure.subplots()
        names = list(reversed(shares))
        axes.barh(names, [shares[name] for name in names], color=_OURS)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("share of the target: right of the line is met")
        yield _save(figure, folder / f"performance-{part}.png")
    if lines := growth(result):
        figure = Figure(figsize=(_WIDTH, 3), layout="constrained")
        axes = figure.subplots()
        for who, points in lines.items():
            ours = who == "finalize"
            axes.plot(*zip(*points, strict=True), marker="o", color=_OURS if ours else _THEIRS,
                      label="ours" if ours else "the original design")  # fmt: skip
        axes.set_xlabel("ticks of history")
        axes.set_ylabel("seconds for one more")
        axes.set_ylim(bottom=0)
        axes.legend()
        yield _save(figure, folder / f"performance-{part}-growth.png")
    if parts := portions(result):
        figure = Figure(figsize=(_WIDTH, 0.8 + 0.32 * len(parts)), layout="constrained")
        axes = figure.subplots()
        names = list(reversed(parts))
        axes.barh(names, [parts[name] for name in names], color=_OURS)
        axes.set_xlabel("seconds")
        yield _save(figure, folder / f"performance-{part}-time.png")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path
