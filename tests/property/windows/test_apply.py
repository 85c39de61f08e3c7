"""The apply protocol under any mix of faults: the ledger is a gap-free prefix, the warehouse is its oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LockstepError
from lockstep.windows.model import Window
from tests.windows_lane import LaneUnderTest
from tests.windows_world import expected, warehouse_rows

pytestmark = pytest.mark.stack

_POINTS = (
    "windows.lane.after_claim",
    "windows.stage.after_copy",
    "windows.apply.after_deletes",
    "windows.apply.before_commit",
    "windows.apply.after_commit",
    "windows.drain.after_window",
)
_events = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 2), st.sampled_from([""])),
    st.tuples(st.just("hold back"), st.just(1), st.sampled_from([""])),
    st.tuples(st.just("arrive"), st.just(1), st.sampled_from([""])),
    st.tuples(
        st.just("drain"), st.just(1), st.sampled_from(["", *(f"{p}={m}" for p in _POINTS for m in ("raise", "error"))])
    ),
)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(_events, min_size=3, max_size=7), st.integers(0, 10**6))
def test_any_mix_of_arrivals_and_faults_leaves_a_prefix_and_ends_as_the_oracle(
    new_lane: Callable[..., LaneUnderTest], events: list[tuple[str, int, str]], seed: int
):
    """Guards what examples cannot: orders of faults that nobody thought of."""
    lane, late = new_lane(seed=seed), list[Window]()
    for event, count, fault in events:
        if event == "publish":
            lane.world.publish(count, rows=2)
        elif event == "hold back":
            late += lane.world.publish(1, rows=2, enqueue=False)
        elif event == "arrive" and late:
            lane.world.enqueue([late.pop()])
        elif event == "drain":
            _drain(lane, fault)
            lane.assert_prefix()
            _assert_rows_of_prefix(lane)
    lane.world.enqueue(late)
    _free(lane)
    lane.worker().drain(lane.vault)
    lane.assert_equals_oracle()


def _drain(lane: LaneUnderTest, fault: str) -> None:
    _free(lane)
    if not fault:
        lane.worker().drain(lane.vault)
        return
    point, mode = fault.split("=")
    with suppress(CrashInjected, LockstepError), armed(point, mode):
        lane.worker().drain(lane.vault)


def _free(lane: LaneUnderTest) -> None:
    """Whoever held the lane is dead: its lease runs out. A window that a fault made FAILED is set READY again."""
    lane.warehouse("UPDATE windows.apply_control SET lease_until = now() WHERE vault = %s RETURNING 1", lane.vault)
    for window, status in zip(lane.world.windows, lane.world.statuses(), strict=True):
        if status == "FAILED":
            lane.world.dynamodb.update_item(
                TableName=lane.world.table,
                Key={"vault_id": {"S": lane.vault}, "stoptime": {"S": window.sort_key}},
                UpdateExpression="SET #s = :ready",
                ExpressionAttributeNames={"#s": "status"},
                ExpressionAttributeValues={":ready": {"S": "READY"}},
            )


def _assert_rows_of_prefix(lane: LaneUnderTest) -> None:
    done = len(lane.history())
    windows = lane.world.windows
    wanted = lane.world.oracle if done == len(windows) else lane.world.before[windows[done].stop]
    found = warehouse_rows(lane.dsn, f"vault_{lane.vault}")
    assert {name: rows for name, rows in found.items() if rows} == {
        name: rows for name, rows in expected(wanted).items() if rows
    }
