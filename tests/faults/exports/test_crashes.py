"""kill -9 at every step of a job's life, a paused worker that wakes up late, and what must hold afterwards.

Victims are forked processes that die by a real SIGKILL at a named point; the survivors then finish the work.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lockstep.exports import rules
from lockstep.exports.model import JobStatus, Place
from lockstep.exports.store import JobStore
from lockstep.kernel.crash import armed, declared_points
from lockstep.kernel.postgres import pool
from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from resources.exports import s3_client
from services.exports import create_app
from tests.faults.modes import FAILS, HANGS, meet
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

RECENT = f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"
OLD = "20250215"
# The last key is large enough to go up in parts, the one before it never succeeds.
FUNCTION = """
CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (n integer, a text) LANGUAGE plpgsql AS $$
BEGIN
  IF key = 'BAD' THEN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END IF;
  RETURN QUERY SELECT i, repeat(md5(i::text), CASE WHEN key = 'BIG' THEN 100 ELSE 1 END)
                 FROM generate_series(1, CASE WHEN key = 'BIG' THEN 3000 ELSE 50 END) AS i;
END $$"""

WORKER_POINTS = {
    "exports.loop.reserved": "ABC",
    "exports.claim.before_commit": "ABC",
    "exports.claim.after_commit": "ABC",
    "exports.build.piece": "ABC",
    "exports.build.uploaded": "ABC",
    "exports.upload.begun": "BIG",
    "exports.publish.guarded": "BIG",
    "exports.publish.stored": "ABC",
    "exports.publish.before_commit": "ABC",
    "exports.publish.after_commit": "ABC",
    "exports.reuse.before_commit": "OLD",
    "exports.fail.before_commit": "BAD",
    "exports.fail.after_commit": "BAD",
}
SUBMIT_POINTS = [
    "exports.submit.job_written",
    "exports.submit.before_commit",
    "exports.submit.after_commit",
    "exports.api.before_answer",
]
OTHER_POINTS = {"exports.retry.before_commit"}


@pytest.fixture(scope="module")
def broken_world(module_world: World) -> World:
    module_world.source("DROP FUNCTION export_rows(text, date)")
    module_world.source(FUNCTION)
    return module_world


def _in_child(action: Callable[[], Any], *, during: Callable[[int], None] = lambda pid: None) -> int:
    """Run in a process of its own and return its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    during(child)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child did not end")


def _own(world: World, state: Any) -> World:
    """The same world seen through connections of this process: forked sockets are not shared."""
    return World(world.state_dsn, world.source_dsn, world.bucket, state, s3_client("us-east-1"), world.client)


def _work_and_die(world: World, point: str) -> Callable[[], None]:
    def action() -> None:
        with pool(world.state_dsn, application_name="victim", max_size=3) as state, armed(point, "kill"):
            _own(world, state).drain()

    return action


def _recover(world: World) -> None:
    world.ask("UPDATE exports.job_chunk SET lease_until = now() WHERE status = 'RUNNING'")
    for _ in range(world.limits.max_attempts + 1):
        world.claims("reaper").reap()
        world.ask(
            "UPDATE exports.job_chunk SET run_at = now(), reserved_until = NULL, batch_id = NULL"
            " WHERE status = 'PENDING'"
        )
        world.drain()


def _assert_sound(world: World, job_id: str) -> None:
    for chunk in world.jobs.chunks(job_id):
        assert chunk.attempts <= world.limits.max_attempts
        if chunk.status == "DONE":
            data = world.read(str(chunk.object_key))
            assert (hashlib.sha256(data).hexdigest(), len(data)) == (chunk.sha256, chunk.bytes)


def _job_for(world: World, point: str) -> str:
    """A job whose only chunk leads past the point."""
    key = WORKER_POINTS[point]
    if key != "OLD":
        return world.submit((key, RECENT))
    world.submit(("OLD", OLD))
    world.drain()
    return world.submit(("OLD", OLD))


@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_worker_killed_anywhere_loses_nothing_and_tears_nothing(broken_world: World, point: str):
    world, key = broken_world, WORKER_POINTS[point]
    job_id = _job_for(world, point)
    status = _in_child(_work_and_die(world, point))
    assert os.WIFSIGNALED(status), f"{point} was never reached"
    assert os.WTERMSIG(status) == signal.SIGKILL
    _recover(world)
    job = world.job(job_id)
    assert job.status is (JobStatus.FAILED if key == "BAD" else JobStatus.COMPLETED)
    _assert_sound(world, job_id)


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_worker_that_fails_or_sleeps_through_its_lease_anywhere_tears_and_doubles_nothing(
    broken_world: World, point: str, mode: str
):
    """While it hangs its lease ends and another worker builds the chunk; then it wakes up and goes on."""
    world = broken_world
    job_id = _job_for(world, point)
    meet(point, mode, world.drain, lambda: _recover(world), blocked_after=3)
    _recover(world)
    job = world.job(job_id)
    assert job.status is (JobStatus.FAILED if WORKER_POINTS[point] == "BAD" else JobStatus.COMPLETED)
    _assert_sound(world, job_id)


@pytest.mark.parametrize("point", SUBMIT_POINTS)
def test_a_service_killed_while_it_accepts_leaves_a_whole_job_or_none_and_the_repeat_finds_it(
    broken_world: World, stack: Any, point: str, monkeypatch: pytest.MonkeyPatch
):
    """Guards the client whose answer was lost: the same key must lead to exactly one job, never to two or half."""
    world = broken_world
    settings = load_settings(postgres_dsn=world.state_dsn, source_dsn=world.source_dsn, exports_bucket=world.bucket)
    body = {"items": [{"key": "ABC", "effectiveDates": [RECENT, OLD]}]}
    headers = {"X-Api-Key": world.client.api_key, "Idempotency-Key": point}
    before = world.ask("SELECT count(*) FROM exports.job")[0][0]

    def post() -> str:
        with TestClient(create_app(settings)) as http:
            return str(http.post("/jobs", json=body, headers=headers).json()["jobId"])

    def die() -> None:
        with armed(point, "kill"):
            post()

    assert os.WIFSIGNALED(_in_child(die)), f"{point} was never reached"
    job_id = post()
    assert world.ask("SELECT count(*) FROM exports.job")[0][0] == before + 1
    assert world.ask("SELECT count(*) FROM exports.job_chunk WHERE job_id = %s", job_id)[0][0] == 2
    lanes = world.ask("SELECT count(*) FROM kernel.outbox WHERE lane LIKE %s", f"exports/{job_id}/%")
    assert lanes[0][0] == 2
    _recover(world)
    assert world.job(job_id).status is JobStatus.COMPLETED


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize("point", SUBMIT_POINTS)
def test_a_service_that_fails_or_hangs_while_it_accepts_and_the_repeat_that_overtakes_it_make_one_job(
    broken_world: World, stack: Any, point: str, mode: str
):
    world, name = broken_world, f"{point}-{mode}"
    settings = load_settings(postgres_dsn=world.state_dsn, source_dsn=world.source_dsn, exports_bucket=world.bucket)
    headers = {"X-Api-Key": world.client.api_key, "Idempotency-Key": name}
    before = world.ask("SELECT count(*) FROM exports.job")[0][0]

    def post() -> Any:
        with TestClient(create_app(settings), raise_server_exceptions=False) as http:
            body = {"items": [{"key": "ABC", "effectiveDates": [RECENT, OLD]}]}
            return http.post("/jobs", json=body, headers=headers)

    answers = []
    meet(point, mode, lambda: answers.append(post()), lambda: answers.append(post()))
    assert {answer.status_code for answer in answers} <= {202, 409, 503}, "accepted, in flight, or to be repeated"
    final = post()
    assert final.status_code == 202
    accepted = {answer.json()["jobId"] for answer in [*answers, final] if answer.status_code == 202}
    assert len(accepted) == 1
    assert world.ask("SELECT count(*) FROM exports.job")[0][0] == before + 1
    _recover(world)
    assert world.job(accepted.pop()).status is JobStatus.COMPLETED


@pytest.mark.parametrize("mode", [FAILS, HANGS])
def test_a_retry_that_fails_changed_nothing_and_two_at_once_are_one(broken_world: World, mode: str):
    world = broken_world
    job_id = world.submit(("BAD", RECENT))
    _recover(world)
    attempts = [chunk.attempts for chunk in world.jobs.chunks(job_id)]

    def retry() -> None:
        world.jobs.retry(job_id)

    meet("exports.retry.before_commit", mode, retry, retry)
    assert world.job(job_id).status is (JobStatus.FAILED if mode == FAILS else JobStatus.IN_PROGRESS)
    if mode == HANGS:
        _recover(world)
        again = [chunk.attempts for chunk in world.jobs.chunks(job_id)]
        assert world.job(job_id).status is JobStatus.FAILED
        assert again == attempts, "one retry means one new round of attempts"


def test_a_retry_killed_before_its_commit_changed_nothing(broken_world: World):
    world = broken_world
    job_id = world.submit(("BAD", RECENT))
    _recover(world)
    assert world.job(job_id).status is JobStatus.FAILED
    before = world.job(job_id)

    def die() -> None:
        with pool(world.state_dsn, application_name="victim") as state, armed("exports.retry.before_commit", "kill"):
            JobStore(state, place=Place(world.bucket), limits=world.limits).retry(job_id)

    assert os.WIFSIGNALED(_in_child(die))
    assert world.job(job_id) == before


def test_every_crash_point_of_exports_has_a_test():
    """Guards new steps: a point that nobody kills is a promise that nobody checked."""
    declared = {*declared_points(PROJECT_ROOT / "lockstep"), *declared_points(PROJECT_ROOT / "services")}
    covered = {*WORKER_POINTS, *SUBMIT_POINTS, *OTHER_POINTS}
    assert {name for name in declared if name.startswith("exports.")} == covered


def test_a_worker_that_sleeps_through_its_lease_wakes_up_and_changes_nothing(broken_world: World):
    """A real SIGSTOP: the zombie has its bytes ready and only needs to publish when it is let go."""
    world = broken_world
    job_id = world.submit(("ZOMBIE", RECENT))
    after_takeover: list[Any] = []

    def build_slowly() -> None:
        with (
            pool(world.state_dsn, application_name="zombie", max_size=3) as state,
            armed("exports.build.uploaded", "hang:1.5"),
        ):
            own = _own(world, state)
            tally = own.worker().work(str(own.claims().reserve(1).batch_id))  # type: ignore[union-attr]
            os._exit(7 if (tally.lost, tally.built) == (1, 0) else 8)

    def take_over(zombie: int) -> None:
        deadline = time.monotonic() + 60
        while world.job(job_id).counts.running == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(zombie, signal.SIGSTOP)
        _recover(world)
        after_takeover.extend([world.job(job_id), world.jobs.chunks(job_id), _object(world)])
        os.kill(zombie, signal.SIGCONT)

    status = _in_child(build_slowly, during=take_over)
    assert os.waitstatus_to_exitcode(status) == 7, "the zombie must learn that it lost"
    assert after_takeover == [world.job(job_id), world.jobs.chunks(job_id), _object(world)]
    assert world.job(job_id).status is JobStatus.COMPLETED


def _object(world: World) -> Any:
    day = datetime.strptime(RECENT, "%Y%m%d").replace(tzinfo=UTC)
    name = rules.object_key("exports", "ZOMBIE", day, *_csv())
    return world.s3.head_object(Bucket=world.bucket, Key=name)["LastModified"], world.read(name)


def _csv() -> tuple[Any, Any]:
    from lockstep.exports.model import Format, FormulaGuard

    return Format.CSV, FormulaGuard.NONE
