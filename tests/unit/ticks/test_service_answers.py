"""What an agent is told when something goes wrong behind the door: which answers mean `again`, which mean `never`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from lockstep.kernel.errors import LockstepError, LostClaim, Terminal
from lockstep.ticks.errors import InFlight, NotYet
from resources.ticks import WarmSpark
from services import shell
from services.ingest.contract import INGEST_PROBLEMS

RAISED: dict[str, LockstepError] = {
    "overtaken": LostClaim("attempt 1 left no commit."),
    "in flight": InFlight("the tick is being finalized.", unit="tick t", retry_after=2.0),
    "broken": Terminal("NoSuchBucket: password=hunter2-secret", unit="parts/p/t"),
    "not yet": NotYet("t1 is not committed.", unit="tick t2", waits_for="t1"),
}


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = shell.create_app(
        "ingest", title="Ingest", description="For tests.", readiness_checks={}, problems=INGEST_PROBLEMS
    )

    @app.get("/fail/{name}")
    def fail(name: str) -> None:
        raise RAISED[name]

    with TestClient(app) as http:
        yield http


def test_an_agent_whose_finalize_was_overtaken_is_told_to_ask_again(client: TestClient):
    """Guards the tick: 409 without a list of parts is an answer to which an agent can only stop and call a person."""
    answer = client.get("/fail/overtaken")
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/transient")
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("name", "kind"), [("in flight", "/problems/in-flight"), ("not yet", "/problems/previous-tick-missing")]
)
def test_too_early_says_when_to_ask_again_and_that_it_helps(client: TestClient, name: str, kind: str):
    """Guards agents that branch on `retryable`: with `false` they give up a tick that is about to be committed."""
    answer = client.get(f"/fail/{name}")
    assert (answer.status_code, answer.json()["type"]) == (425, kind)
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) > 0


def test_what_the_platform_lacks_is_no_fault_of_the_tick(client: TestClient):
    """Guards every agent at once: a lost key or bucket answered with 422 would stop all of them until a person came."""
    answer = client.get("/fail/broken")
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/transient")
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) > 0
    assert "hunter2" not in answer.text
    with pytest.raises(Terminal, match="LOCKSTEP_SPARK_REMOTE"):
        WarmSpark(None).session()
