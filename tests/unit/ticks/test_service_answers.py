"""What an agent is told when something goes wrong behind the door: which answers mean `again`, which mean `never`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from lockstep.kernel.errors import LockstepError, LostClaim
from services import shell
from services.ingest.contract import INGEST_PROBLEMS

RAISED: dict[str, LockstepError] = {
    "overtaken": LostClaim("attempt 1 left no commit."),
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
