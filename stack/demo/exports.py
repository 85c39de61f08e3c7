"""Exports: one job of many files built by Spark, and a second one that reuses most of them.

What belongs here: the plot and what is claimed of it. What does not: the bytes that a file must have (oracle.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import httpx

from lockstep.faults import oracle
from lockstep.kernel.errors import Transient
from stack.demo.stage import Stage

SCENE = "exports"
_SETTLED = timedelta(days=60)  # far enough back that a file is final and may be reused
_FETCHES = 4
_ENDS = ("COMPLETED", "FAILED", "CANCELLED")


class File(NamedTuple):
    """One file of a manifest, and the checksum of what was really downloaded."""

    key: str
    day: date
    told: str
    real: str


def play(stage: Stage) -> None:
    """The scene."""
    name = f"demo-{stage.token}"
    made = stage.command(SCENE, "exports", "client", "add", name, "--tenant", name)
    base = stage.url("dagster")
    stage.links["partitions of the exports"] = f"{base}/assets/export_chunks?view=partitions"
    with httpx.Client(base_url=stage.url("exports"), headers={"X-Api-Key": made["api_key"]}, timeout=60) as http:
        first = _job(stage, http, _wanted(stage, shift=0), "the first job")
        _examine(stage, http, first, "the first job", generated=stage.sizes.chunks, reused=0)
        fresh = _fresh_keys(stage) * stage.sizes.days
        again = _job(stage, http, _wanted(stage, shift=_fresh_keys(stage)), "the second job")
        _examine(stage, http, again, "the second job", generated=fresh, reused=stage.sizes.chunks - fresh)


def _fresh_keys(stage: Stage) -> int:
    """How many keys of the second job the first did not have: a quarter."""
    return max(1, stage.sizes.keys // 4)


def _wanted(stage: Stage, shift: int) -> list[tuple[str, date]]:
    today = datetime.now(UTC).date()
    days = [today - _SETTLED - timedelta(days=number) for number in range(stage.sizes.days)]
    return [(f"K{number:04d}", day) for number in range(1 + shift, 1 + shift + stage.sizes.keys) for day in days]


def _job(stage: Stage, http: httpx.Client, wanted: list[tuple[str, date]], words: str) -> Mapping[str, Any]:
    """Submit, as a client does after a timeout: twice with one Idempotency-Key. Then follow it to its end."""
    days: dict[str, list[str]] = {}
    for key, day in wanted:
        days.setdefault(key, []).append(f"{day:%Y%m%d}")
    body = {"items": [{"key": key, "effectiveDates": found} for key, found in days.items()]}
    headers = {"Idempotency-Key": f"demo-{stage.token}-{words.replace(' ', '-')}"}
    stage.say(SCENE, f"POST /jobs: {words}, {len(wanted)} files")
    answers = [http.post("/jobs", json=body, headers=headers).raise_for_status().json()["jobId"] for _ in range(2)]
    stage.claim(SCENE, f"{words}, submitted twice with one key, is one job", 1, len(set(answers)))
    stage.wait(lambda: _ended(stage, http, answers[0], words), f"the end of job {answers[0]}")
    job: Mapping[str, Any] = http.get(f"/jobs/{answers[0]}").raise_for_status().json()
    return job


def _ended(stage: Stage, http: httpx.Client, job_id: str, words: str) -> bool:
    answer = http.get(f"/jobs/{job_id}")
    if answer.is_server_error:
        raise Transient(f"the service answered {answer.status_code}.", unit=job_id)
    job = answer.raise_for_status().json()
    stage.say(SCENE, f"{words} {job_id}: {job['status']}, {job['done']} of {job['total']} files")
    return job["status"] in _ENDS


def _examine(
    stage: Stage, http: httpx.Client, job: Mapping[str, Any], words: str, *, generated: int, reused: int
) -> None:
    total = stage.sizes.chunks
    stage.claim(SCENE, f"{words} completes", f"COMPLETED {total}", f"{job['status']} {job['done']}")
    counts = f"{job['filesGenerated']} built, {job['filesReused']} reused"
    stage.claim(SCENE, f"{words} builds what is new and reuses the rest", f"{generated} built, {reused} reused", counts)
    stage.say(SCENE, f"{words}: downloading {total} files and hashing them against the formula of the source")
    with httpx.Client(timeout=60) as plain, ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch") as pool:
        files = list(pool.map(lambda one: _fetch(stage, plain, one), _manifest(http, str(job["jobId"]))))
    right = sum(one.real == one.told == oracle.source_sha256(one.key, one.day) for one in files)
    stage.claim(SCENE, f"{words}: every file has the SHA-256 computed apart from the worker", total, right)
    stage.claim(
        SCENE, f"{words}: no file is missing or listed twice", total, len({(one.key, one.day) for one in files})
    )


def _manifest(http: httpx.Client, job_id: str) -> Iterator[Mapping[str, Any]]:
    cursor: str | None = None
    while True:
        page = (
            http.get(f"/jobs/{job_id}/manifest", params={"cursor": cursor} if cursor else {}).raise_for_status().json()
        )
        yield from page["files"]
        cursor = page.get("nextCursor")
        if not cursor:
            return


def _fetch(stage: Stage, plain: httpx.Client, listed: Mapping[str, Any]) -> File:
    """Download one file by the address of the manifest, which is signed and needs no key."""
    stage.check()
    content = plain.get(listed["url"]).raise_for_status().content
    day = date.fromisoformat(listed["date"])
    return File(listed["key"], day, listed["sha256"], hashlib.sha256(content).hexdigest())
