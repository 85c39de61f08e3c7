"""The alert of a failed window: one per attempt, with what a person needs and no value of a row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from lockstep.kernel.errors import Terminal
from lockstep.readiness.model import Level, parse_key
from lockstep.windows.alerts import window_failed
from lockstep.windows.model import Window

STOP = datetime(2026, 1, 1, 0, 30, tzinfo=UTC)
WINDOW = Window("Vault_7", STOP - timedelta(minutes=15), STOP)
ERROR = Terminal('study__v, row 3: invalid input "Jane Doe"')


def test_an_alert_names_vault_and_window_but_no_value():
    alert = window_failed(WINDOW, 4, ERROR, STOP)
    assert alert.level is Level.ERROR
    assert "Vault_7 window 202601010030" in alert.message
    assert "row 3" in alert.message
    assert "Jane" not in alert.message


def test_the_same_attempt_is_one_alert_and_the_next_attempt_another():
    first, again, later = (window_failed(WINDOW, fence, ERROR, STOP) for fence in (4, 4, 5))
    assert first.id == again.id
    assert later.id != first.id


def test_the_key_of_an_alert_is_one_that_the_readiness_plane_accepts():
    key = window_failed(WINDOW, 4, ERROR, STOP).key
    assert parse_key(key.pipeline, key.date.isoformat(), key.schedule) == key
