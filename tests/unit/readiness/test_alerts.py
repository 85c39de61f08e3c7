"""Alerts on their way out: every sink's form, and no sink that can harm a run."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import Transient
from lockstep.readiness.alerts import ConsoleSink, Dispatcher, FileSink, S3Sink, SnsSink, WebhookSink
from lockstep.readiness.model import Alert, Key, Level
from lockstep.readiness.safety import guarded_client
from tests.unit.readiness.builders import DAY, NOW
from tests.unit.readiness.webserver import serving
from tests.unit.readiness.world import Pager

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
