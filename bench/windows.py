"""Windows against a hand-written loader, one run per window, and dlt, on the same files in the same run.

What belongs here: the order of measurements and the ratios. What does not: the files (windows_files.py), the baselines
(windows_baselines.py) and the pipeline. The platform is measured whole: sensor, run, Spark, commits and events, from
the moment the first window of a backlog is READY to the last commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.report import Context, Result, Target, median, seconds
from bench.windows_baselines import by_hand, with_dlt
from bench.windows_files import OBJECTS, ROWS, Files
from bench.windows_platform import Platform

PARTS = ["postgres", "dynamodb", "s3", "spark", "vault", "dagster-code", "dagster-daemon"]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    backlog: int = 960
    repeat: int = 3
    small: int = 96
    singles: int = 5
    dlt: int = 12
    large_rows: int = 2_000_000
    fetch: int = 96


QUICK = Sizes(backlog=96, repeat=1, small=12, singles=1, dlt=0, large_rows=50_000, fetch=12)


def run(context: Context) -> Result:
    """Measure on the stack of the benchmarks, on the last vault of its settings, whose chain begins here."""
    sizes, result = QUICK if context.quick else Sizes(), Result()
    platform = Platform.start(PARTS)
    try:
        vault = platform.begin()
        files = Files(platform.s3, platform.bucket, vault, platform.watermark())
        context.say("one window first, so that code, Spark and tables are warm")
        platform.apply(files.publish(1))
        platform.rest()
        _singles(context, platform, files, sizes, result)
        _backlog(context, platform, files, sizes, result)
        _large(context, platform, files, sizes, result)
        _fetch(context, platform, sizes, result)
    finally:
        platform.close()
    return result


def _singles(context: Context, platform: Platform, files: Files, sizes: Sizes, result: Result) -> None:
    """One run per window, each asked for when the run before it has ended, as a sensor without drains would."""
    context.say(f"{sizes.singles} windows, one run each")
    latency, splits = [], []

    def one() -> None:
        latency.append(platform.apply(files.publish(1)))
        splits.append(platform.split())
        platform.rest()

    result.samples["one run per window, s each"] = [seconds(one) for _ in range(sizes.singles)]
    result.samples["READY to APPLIED of a single window, s"] = latency
    context.say(f"{median(latency):.1f} s from READY to APPLIED")
    for name in splits[0]:
        result.samples[f"  of a single window: {name}, s"] = [split[name] for split in splits]


def _backlog(context: Context, platform: Platform, files: Files, sizes: Sizes, result: Result) -> None:
    windows = files.publish(sizes.small)
    with platform.memory() as little:
        platform.apply(windows)
    platform.rest()
    ours, theirs, splits, peaks = [], [], [], []
    for turn in range(sizes.repeat):  # in turns: a busy minute of the machine meets both
        context.say(f"a backlog of {sizes.backlog} windows with {OBJECTS} objects of {ROWS} rows, {turn + 1}: files")
        windows = files.publish(sizes.backlog)
        context.say("through the platform")
        with platform.memory() as much:
            ours.append(platform.apply(windows))
        platform.rest()
        splits.append(platform.split())
        peaks.append(much())
        context.say(f"{ours[-1]:.1f} s; the same files by hand")
        theirs.append(seconds(partial(by_hand, platform, windows)))
        context.say(f"{theirs[-1]:.1f} s by hand")
    result.samples["platform, s"], result.samples["hand-written, s"] = ours, theirs
    for name in splits[0]:
        result.samples[f"  of that: {name}, s"] = [split[name] for split in splits]
    # A few windows are over before the run has begun: only the whole backlog is held against the loader.
    result.ratio("vs_handwritten", median(theirs) / median(ours), None if context.quick else Target(1.2))
    each = median(result.samples["one run per window, s each"])
    result.ratio("vs_run_per_window", each * sizes.backlog / median(ours), Target(30))
    result.ratio("memory_growth", max(peaks) / little(), Target(1.2, at_least=False))
    result.samples[f"memory at {sizes.small} and {sizes.backlog} windows, MB"] = [little(), max(peaks)]
    if not sizes.dlt:
        return
    context.say(f"the first {sizes.dlt} of them with dlt")
    dlt = with_dlt(platform, windows[: sizes.dlt], context.say)
    if dlt is not None:
        result.samples["dlt, s per window"] = dlt
        result.ratio("vs_dlt", median(dlt) * sizes.backlog / median(ours))


def _large(context: Context, platform: Platform, files: Files, sizes: Sizes, result: Result) -> None:
    """One window with many rows must not need more memory than many windows with few."""
    context.say(f"one window of {sizes.large_rows} rows")
    (little,) = result.samples[f"memory at {sizes.small} and {sizes.backlog} windows, MB"][:1]
    windows = files.publish_large(sizes.large_rows)
    with platform.memory() as much:
        result.samples[f"a window of {sizes.large_rows} rows, s"] = [platform.apply(windows)]
    platform.rest()
    result.samples[f"memory at {sizes.large_rows} rows, MB"] = [much()]
    result.ratio("memory_large_window", much() / little, Target(1.2, at_least=False))


def _fetch(context: Context, platform: Platform, sizes: Sizes, result: Result) -> None:
    """The producer's side, with the vendor on this machine: what its network adds is not in it."""
    context.say(f"{sizes.fetch} windows of the vendor's simulator, fetched, examined and stored, {sizes.repeat} times")
    found = result.samples["fetching a window, s"] = [platform.fetch(sizes.fetch) for _ in range(sizes.repeat)]
    context.say(f"{median(found):.3f} s a window")
