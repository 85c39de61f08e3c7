"""Alerts on their way out: every sink's form, and no sink that can harm a run."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import Transient
from lockstep.kernel.ids import SeededIds
from lockstep.readiness.alerts import AlertDoor, ConsoleSink, Dispatcher, FileSink, S3Sink, SnsSink, WebhookSink
from lockstep.readiness.model import Alert, Key, Level
from lockstep.readiness.safety import guarded_client
from tests.unit.readiness.builders import DAY, NOW
from tests.unit.readiness.webserver import serving
from tests.unit.readiness.world import Pager, World

ALERT = Alert(Key("sales" * 30, DAY, "h06"), "stuck_run", Level.ERROR, "hangs", NOW, {"runId": "r"})


def _client(service: str):
    return boto3.client(service, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


def test_a_file_has_one_json_object_per_line(tmp_path: Path):
    sink = FileSink(tmp_path / "alerts.jsonl")
    sink.send(ALERT)
    sink.send(ALERT)
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [line["alertType"] for line in lines] == ["stuck_run", "stuck_run"]
    assert lines[0]["alertId"].endswith(":h06:2026-03-10:stuck_run")


def test_a_webhook_is_tried_twice_and_carries_the_alerts_identity():
    answers = iter([(503, {}), (204, b"")])
    with serving(lambda _: next(answers)) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        WebhookSink(client, url).send(ALERT)
    assert [request.headers["idempotency-key"] for request in seen] == [ALERT.id, ALERT.id]
    with serving(lambda _: (400, {})) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        with pytest.raises(Transient):
            WebhookSink(client, url).send(ALERT)
        assert len(seen) == 1


def test_sns_gets_a_subject_of_at_most_a_hundred_characters():
    client = _client("sns")
    topic = "arn:aws:sns:us-east-1:123456789012:alerts"
    with Stubber(client) as stub:
        stub.add_response("publish", {"MessageId": "1"})
        SnsSink(client, topic).send(ALERT)
        stub.assert_no_pending_responses()


def test_s3_gets_one_object_per_alert_whoever_sends_it():
    client = _client("s3")
    expected = {
        "Bucket": "b",
        "Key": f"alerts/2026-03-10/{ALERT.key.pipeline}/h06-stuck_run-error.json",
        "Body": json.dumps(json.loads(_encoded()), sort_keys=True, separators=(",", ":")).encode(),
        "ContentType": "application/json",
    }
    with Stubber(client) as stub:
        stub.add_response("put_object", {}, expected)
        S3Sink(client, "b").send(ALERT)
        stub.assert_no_pending_responses()


def _encoded() -> str:
    from lockstep.readiness import codec

    return codec.dumps(codec.encode_alert(ALERT))


def test_a_failing_sink_harms_nobody_and_is_left_alone_for_a_minute():
    clock, broken, good = FakeClock(), Pager(), Pager()
    broken.broken = True
    dispatcher = Dispatcher([broken, good, ConsoleSink()], clock)
    assert dispatcher.dispatch([ALERT]) == {ALERT.id}
    assert dispatcher.dispatch([ALERT]) == {ALERT.id}
    assert (dispatcher.failed, len(good.alerts)) == (1, 2)
    clock.advance(61)
    dispatcher.dispatch([ALERT])
    assert dispatcher.failed == 2


def test_what_no_sink_took_is_not_delivered():
    broken = Pager()
    broken.broken = True
    assert Dispatcher([broken], FakeClock()).dispatch([ALERT]) == frozenset()
    assert Dispatcher([], FakeClock()).dispatch([ALERT]) == {ALERT.id}


# --- the door that every pipeline uses ---


class _Away:
    """A table that cannot be reached."""

    def raise_alert(self, *_: object) -> bool:
        raise Transient("the table is away")

    def alert_delivered(self, *_: object) -> None:
        raise Transient("the table is away")


def test_any_pipeline_alerts_once_per_kind_unit_and_day():
    world = World()
    door = world.plane.alerts
    assert door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:15", "the checksum differs")
    assert not door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:15", "the checksum differs")
    assert door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:30", "another window")
    assert door.raise_now("windows.gap", Level.WARNING, "1001/2026-03-10T00:15", "another kind")
    world.clock.advance(86400)
    assert door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:15", "it still does")
    assert [(alert.key.pipeline, alert.kind) for alert in world.pager.alerts] == [
        ("windows", "window_failed"),
        ("windows", "window_failed"),
        ("windows", "gap"),
        ("windows", "window_failed"),
    ]
    assert world.pager.alerts[0].details["unit"] == "1001/2026-03-10T00:15"
    kinds = [event["kind"] for event in world.store.events("windows", world.clock.now())]
    assert kinds == ["ALERT"] * 4, "each is in the event log too"


def test_an_alert_without_an_owner_is_the_platforms():
    world = World()
    world.plane.alerts.raise_now("disk_full", "error", "/data", "x" * 900)
    (alert,) = world.pager.alerts
    assert (alert.key.pipeline, alert.kind, len(alert.message)) == ("lockstep", "disk_full", 500)


def test_a_table_that_is_away_costs_the_once_and_not_the_alert():
    pager, clock = Pager(), FakeClock()
    door = AlertDoor(_Away(), Dispatcher([pager], clock), clock, SeededIds(1))
    assert door.raise_now("exports.chunk_parked", "error", "J1/7", "gave up")
    assert door.raise_now("exports.chunk_parked", "error", "J1/7", "gave up")
    assert pager.kinds == ["chunk_parked", "chunk_parked"]


def test_an_alert_that_no_sink_took_is_sent_by_the_next_round_of_the_watchdog():
    """Guards a sender that dies between its record and its sink: the record alone would keep it silent for ever."""
    world = World()
    world.pager.broken = True
    assert world.plane.alerts.raise_now("exports.chunk_parked", "error", "J1/7", "gave up")
    world.pager.broken = False
    world.watchdog.check()
    assert world.pager.kinds == [], "it may be under way at this moment"
    world.clock.advance(120)
    world.watchdog.check()
    world.watchdog.check()
    assert world.pager.kinds == ["chunk_parked"]
