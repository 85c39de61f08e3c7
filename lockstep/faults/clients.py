"""The lab's clients: they write over HTTP, note every invocation and every end, and assume nothing they were not told.

What belongs here: what an outside party does and learns. What does not: faults and judgement. A client whose call ended
without a clear answer notes `info` and asks again with the same key, as a careful client does.
"""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from lockstep.exports.model import JobStatus
from lockstep.faults.history import History, Outcome, Verb
from lockstep.kernel.errors import LockstepError, Transient

_EXPORT_SECONDS = 8.0
_ATTEMPTS = 12
_TRY_AGAIN = frozenset({408, 409, 425, 429})


@dataclass
class Run:
    """What all clients of a run share."""

    history: History
    seed: int
    over: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self.began, 3)

    def pause(self, seconds: float) -> bool:
        """Wait; True when the run is over."""
        return self.over.wait(seconds)


@dataclass
class ExportClient:
    """Submits jobs, polls them, and remembers what it was promised."""

    run: Run
    url: str
    api_key: str
    name: str
    keys: list[str]
    days: list[str]
    jobs: list[str] = field(default_factory=list)

    def work(self) -> None:
        """Submit and poll until the run is over; what was begun is asked to its end."""
        chance, number = random.Random(f"{self.run.seed}/{self.name}"), 0  # noqa: S311  # reproducible on purpose
        with httpx.Client(base_url=self.url, timeout=_EXPORT_SECONDS, headers={"X-Api-Key": self.api_key}) as http:
            while not self.run.pause(chance.uniform(0.3, 1.5)):
                number += 1
                dates = chance.sample(self.days, chance.randint(1, 3))
                body = {"items": [{"key": chance.choice(self.keys), "effectiveDates": dates}]}
                self.submit(http, f"{self.run.seed}-{self.name}-{number}", body)
                if self.jobs:
                    self.look(http, chance.choice(self.jobs))

    def submit(self, http: httpx.Client, key: str, body: dict[str, Any]) -> None:
        """One request with one key, asked until it is answered."""
        for _ in range(_ATTEMPTS):
            begun = self.run.history.invoke(self.name, Verb.WRITE, key, at=self.run.now)
            outcome, answer = _post(http, "/jobs", body, {"Idempotency-Key": key})
            job = str(answer["jobId"]) if outcome is Outcome.OK and answer else None
            self.run.history.end(begun, outcome, unit=job, at=self.run.now)
            if job is not None:
                self.jobs.append(job)
            if outcome is not Outcome.INFO or self.run.pause(0.5):
                return

    def look(self, http: httpx.Client, job: str) -> None:
        """One poll."""
        begun = self.run.history.invoke(self.name, Verb.READ, job, at=self.run.now)
        try:
            answer = http.get(f"/jobs/{job}")
            state = JobStatus(answer.json()["status"]) if answer.status_code == HTTPStatus.OK else None
        except (httpx.HTTPError, ValueError, KeyError):
            state = None
        if state is None:
            self.run.history.end(begun, Outcome.INFO, at=self.run.now)
            return
        found = {"unit": job, "state": state.value, "terminal": state.is_terminal}
        self.run.history.end(begun, Outcome.OK, at=self.run.now, **found)

    def meddle(self, job: str, verb: str) -> None:
        """An operator's deed at a bad moment: `cancel` or `retry`."""
        begun = self.run.history.invoke("operator", Verb.RETRY if verb == "retry" else verb, job, at=self.run.now)
        with httpx.Client(base_url=self.url, timeout=_EXPORT_SECONDS, headers={"X-Api-Key": self.api_key}) as http:
            outcome, _ = _post(http, f"/jobs/{job}:{verb}", None, {}, refusals=frozenset({HTTPStatus.CONFLICT}))
        self.run.history.end(begun, outcome, at=self.run.now)


@dataclass
class Vendor:
    """Publishes windows of one vault at the simulator; holds some back, and lets them go later."""

    run: Run
    controls: str
    vault: str
    withheld: list[str] = field(default_factory=list)

    def work(self) -> None:
        """Publish now and then."""
        chance = random.Random(f"{self.run.seed}/{self.vault}")  # noqa: S311  # reproducible on purpose
        while not self.run.pause(chance.uniform(1.0, 4.0)):
            state = self.control("publish", {"windows": 1})
            if state is None:
                continue
            key = f"windows/{self.vault}/{state['last_stop']}"
            self.run.history.end(
                self.run.history.invoke("vendor", "publish", key, at=self.run.now), Outcome.OK, unit=key
            )
            if chance.random() < 0.15:
                self.control("withhold", {"stop": state["last_stop"], "message": "late"})
                self.withheld.append(state["last_stop"])
            elif self.withheld and chance.random() < 0.5:
                self.release()

    def release(self) -> None:
        """Let go what was held back."""
        while self.withheld and self.control("release", {"stop": self.withheld[0]}) is not None:
            self.withheld.pop(0)

    def control(self, action: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """One of the simulator's controls; None if it did not work."""
        try:
            answer = httpx.post(f"{self.controls}/{self.vault}/{action}", json=data, timeout=20)
        except httpx.HTTPError:
            return None
        found: dict[str, Any] | None = answer.json() if answer.is_success else None
        return found


class Person(NamedTuple):
    """A row that an agent sends."""

    id: int
    name: str


def people(number: int) -> list[Person]:
    """The rows of an agent's tick: some that nobody sent before, and some that the ticks before it sent too.

    The name tells the tick, so that rows which came in another order, twice, or not at all are seen in silver.
    """
    fresh = range(number * 100, number * 100 + number % 5 + 1)
    return [Person(one, f"n{one} of {number}") for one in (*(range(number % 3, 7)), *fresh)]


@dataclass
class TickAgent:
    """One project's agent: puts a part, finalizes, asks again until it is committed, then the next tick."""

    run: Run
    open_client: Callable[[], Any]
    org_id: str
    project_id: str
    sent: dict[str, list[Person]] = field(default_factory=dict)
    """Rows of each tick, noted before it is sent for the first time: it may be committed without an answer."""

    def work(self) -> None:
        """Ticks, one after another."""
        chance, number = random.Random(f"{self.run.seed}/{self.project_id}"), 0  # noqa: S311  # reproducible on purpose
        with tempfile.TemporaryDirectory(prefix="lockstep-agent-") as folder, self.open_client() as client:
            while not self.run.pause(chance.uniform(0.5, 2.0)):
                number += 1
                self.send(
                    client, f"20260507T120000__{self.run.seed}-{number:05}-{self.project_id[-4:]}", number, folder
                )

    def send(self, client: Any, tick_id: str, number: int, folder: str) -> None:
        """One tick to its end, or until the run has been over for too long."""
        rows = self.sent[tick_id] = people(number)
        body = _parquet(rows)
        path = Path(folder) / f"{number}.parquet"
        path.write_bytes(body)
        digest = hashlib.sha256(body).hexdigest()
        manifest = self._manifest(tick_id, digest, len(body), len(rows))
        for _ in range(_ATTEMPTS * 4):
            begun = self.run.history.invoke("agent", Verb.WRITE, tick_id, at=self.run.now)
            try:
                client.put_tick_part(tick_id, 0, path, digest)
                client.finalize_tick(tick_id, manifest)
            except Transient:
                self.run.history.end(begun, Outcome.INFO, at=self.run.now)
                time.sleep(1.0)
                continue
            except LockstepError as error:  # 409 and 422: nothing was committed by this call; it may be by another
                self.run.history.end(begun, Outcome.INFO, at=self.run.now, note=str(error)[:200])
                time.sleep(1.0)
                continue
            self.run.history.end(begun, Outcome.OK, unit=tick_id, at=self.run.now)
            return

    def _manifest(self, tick_id: str, digest: str, size: int, rows: int) -> dict[str, Any]:
        part = {"file_seq": 0, "sha256": digest, "bytes": size, "rows": rows}
        columns = [{"name": "id", "type": "bigint"}, {"name": "name", "type": "string"}]
        table = {"name": "people", "primary_key": ["id"], "columns": columns, "parquets": [part]}
        return {
            "schema_version": "1.0",
            "org_id": self.org_id,
            "project_id": self.project_id,
            "tick_id": tick_id,
            "mode": "delta",
            "dt": "20260507",
            "tables": [table],
        }


def _post(
    http: httpx.Client, path: str, body: Any, headers: dict[str, str], refusals: frozenset[int] = frozenset()
) -> tuple[Outcome, dict[str, Any] | None]:
    """What a caller knows afterwards: done, certainly not done, or nothing."""
    try:
        answer = http.post(path, json=body, headers=headers)
        found = answer.json() if answer.is_success else None
    except (httpx.HTTPError, ValueError):
        return Outcome.INFO, None
    if answer.is_success:
        return Outcome.OK, found
    if answer.status_code in refusals:
        return Outcome.FAIL, None
    unclear = answer.is_server_error or answer.status_code in _TRY_AGAIN
    return (Outcome.INFO if unclear else Outcome.FAIL), None


def _parquet(rows: list[Person]) -> bytes:
    import pyarrow as pa  # only a lab with ticks needs it
    import pyarrow.parquet as pq

    ids, names = [one.id for one in rows], [one.name for one in rows]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "name": names}), buffer)
    return buffer.getvalue()
