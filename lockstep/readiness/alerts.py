"""Alerts on their way to people: sinks, a dispatcher that no sink can harm, and the door that every pipeline uses.

What belongs here: delivery. What does not: when an alert is raised (rules.py and the other pipelines), and that it is
recorded once (store.py). Delivery is at least once; the alert's id is the same every time, so that a sink can tell.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import Transient
from lockstep.kernel.ids import IdSource
from lockstep.kernel.logs import get_logger
from lockstep.readiness import codec
from lockstep.readiness.model import Alert, Key, Level

_log = get_logger("lockstep.alerts")

WEBHOOK_SECONDS = 10.0
PAUSE_SECONDS = 60.0
PLATFORM = "lockstep"
_LONGEST_SUBJECT = 100
_LONGEST_WORDS = 500
_LONGEST_UNIT = 200


class Sink(Protocol):
    """A place that alerts go to."""

    def send(self, alert: Alert) -> None:
        """Deliver, or raise."""
        ...


class ConsoleSink:
    """The process's own log."""

    def send(self, alert: Alert) -> None:
        """One line, at the alert's level."""
        write = {Level.ERROR: _log.error, Level.WARNING: _log.warning, Level.INFO: _log.info}[alert.level]
        write("alert", **codec.encode_alert(alert))


class FileSink:
    """A file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def send(self, alert: Alert) -> None:
        """Append."""
        with self._lock, self._path.open("a", encoding="utf-8") as stream:
            stream.write(codec.dumps(codec.encode_alert(alert)) + "\n")


class WebhookSink:
    """An address that takes JSON. One more try, then it counts as failed."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url

    def send(self, alert: Alert) -> None:
        """Post; the receiver can drop an `Idempotency-Key` it has seen."""
        for last in (False, True):
            try:
                answer = self._client.post(
                    self._url,
                    json=codec.encode_alert(alert),
                    headers={"Idempotency-Key": alert.id},
                    timeout=WEBHOOK_SECONDS,
                )
            except httpx.HTTPError as error:
                if last:
                    raise Transient(f"the webhook cannot be reached: {error!r}", unit=alert.id) from error
                continue
            if answer.is_success:
                return
            if last or answer.status_code < 500:
                raise Transient(f"the webhook answered {answer.status_code}.", unit=alert.id)


class SnsSink:
    """An SNS topic."""

    def __init__(self, client: Any, topic_arn: str) -> None:
        self._client = client
        self._topic = topic_arn

    def send(self, alert: Alert) -> None:
        """Publish; a subject has a hundred characters at most."""
        subject = f"[{alert.level.value}] {alert.key.pipeline}"[:_LONGEST_SUBJECT]
        self._client.publish(TopicArn=self._topic, Subject=subject, Message=codec.dumps(codec.encode_alert(alert)))


class S3Sink:
    """A bucket, one object per alert. The name comes from the alert, so a second delivery overwrites the first."""

    def __init__(self, client: Any, bucket: str, prefix: str = "alerts") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix.strip("/")

    def send(self, alert: Alert) -> None:
        """Put."""
        day = alert.key.date.isoformat()
        name = f"{alert.key.schedule}-{alert.kind}-{alert.level.value}.json"
        self._client.put_object(
            Bucket=self._bucket,
            Key=f"{self._prefix}/{day}/{alert.key.pipeline}/{name}",
            Body=codec.dumps(codec.encode_alert(alert)).encode(),
            ContentType="application/json",
        )


class Dispatcher:
    """Sends alerts to every sink. Thread-safe; never raises.

    An alert counts as delivered when one sink took it, or when there is none. A sink that failed is left alone for a
    minute, so that a dead webhook does not slow every tick.
    """

    def __init__(self, sinks: Sequence[Sink], clock: Clock | None = None) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock or SystemClock()
        self._paused_until = [0.0] * len(self._sinks)
        self.failed = 0

    def dispatch(self, alerts: Iterable[Alert]) -> frozenset[str]:
        """The ids of the alerts that somebody took."""
        return frozenset(alert.id for alert in alerts if self._send(alert))

    def _send(self, alert: Alert) -> bool:
        taken = not self._sinks
        for place, sink in enumerate(self._sinks):
            if self._clock.monotonic() < self._paused_until[place]:
                continue
            try:
                sink.send(alert)
            except Exception as error:  # whatever a sink does wrong, a run must not notice
                self.failed += 1
                self._paused_until[place] = self._clock.monotonic() + PAUSE_SECONDS
                _log.warning("sink failed", sink=type(sink).__name__, alert=alert.id, error=str(error))
            else:
                taken = True
        return taken


class Recorder(Protocol):
    """Where it is written down that an alert was raised."""

    def raise_alert(self, alert: Alert, owner: str, now: datetime) -> bool:
        """Record it, undelivered; False if it was raised before."""
        ...

    def alert_delivered(self, alert: Alert) -> None:
        """Some sink took it."""
        ...


class AlertDoor:
    """The one door for alerts that no execution carries: the watchdog's, and those of the other pipelines.

    An alert is raised once per kind, unit and day. It is recorded before it is sent, so that one whose sender died is
    sent by the next round of the watchdog. Thread-safe; never raises: a run must not fail because of its alert.
    """

    def __init__(self, recorder: Recorder, dispatcher: Dispatcher, clock: Clock, ids: IdSource) -> None:
        self._recorder = recorder
        self._dispatcher = dispatcher
        self._clock = clock
        self._ids = ids

    def raise_now(
        self,
        kind: str,
        level: Level | Literal["error", "warning", "info"],
        unit: str,
        words: str,
        *,
        details: Mapping[str, Any] | None = None,
    ) -> bool:
        """Tell people about a unit of any pipeline; False if they were told of it today.

        Args:
            kind: `windows.window_failed`: whose alert it is, a dot, and what happened.
            level: How loud.
            unit: Which window, chunk, tick. Put the attempt into it if every attempt should be heard of.
            words: What happened and what to do next.
            details: Anything else that a sink may show.
        """
        pipeline, _, name = kind.rpartition(".")
        now = self._clock.now()
        key = Key(pipeline or PLATFORM, now.date(), re.sub(r"[^A-Za-z0-9._:-]+", "-", unit)[:_LONGEST_UNIT])
        told = {"unit": unit, **(details or {})}
        return self.raise_alert(Alert(key, name, Level(level), words[:_LONGEST_WORDS], now, told))

    def raise_alert(self, alert: Alert) -> bool:
        """Record an alert and send it; False if it was raised before."""
        try:
            new = self._recorder.raise_alert(alert, self._ids.new_id(), self._clock.now())
        except Exception as error:  # better told twice than not at all
            _log.warning("alert not recorded", alert=alert.id, error=str(error))
            self._dispatcher.dispatch([alert])
            return True
        if new:
            self.deliver(alert)
        return new

    def deliver(self, alert: Alert) -> bool:
        """Send a recorded alert; False if no sink took it, then a later round tries again."""
        if not self._dispatcher.dispatch([alert]):
            return False
        try:
            self._recorder.alert_delivered(alert)
        except Exception as error:  # it is sent again under the same id
            _log.warning("delivery not recorded", alert=alert.id, error=str(error))
        return True
