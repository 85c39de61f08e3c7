"""The OpenAPI document against the service that it describes, by machine: every operation, then whole conversations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings

from lockstep.kernel.settings import load_settings
from services.exports import create_app
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

CALM = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def served(module_world: World, stack: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.site().environment.items():
            patch.setenv(name, value)
        app = create_app(
            load_settings(
                postgres_dsn=module_world.state_dsn,
                source_dsn=module_world.source_dsn,
                exports_bucket=module_world.bucket,
            )
        )
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield app, f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(timeout=30)


@pytest.fixture(scope="module")
def contract(served: tuple[Any, str], module_world: World) -> Any:
    app, address = served
    schema = schemathesis.openapi.from_dict(app.openapi())
    schema.config.update(base_url=address, headers={"X-Api-Key": module_world.client.api_key})
    return schema.exclude(tag="operations")


lazy = schemathesis.pytest.from_fixture("contract")


@lazy.parametrize()
@CALM
def test_every_operation_keeps_its_contract(case: Any):
    """Guards statuses, headers, schemas, refusals and authentication of every route at once."""
    case.call_and_validate()


def test_conversations_along_the_links_keep_the_contract(contract: Any):
    """Guards what only a sequence shows: submit, read, cancel, retry in any order."""
    machine = contract.as_state_machine()
    machine.run(settings=settings(CALM, max_examples=10, stateful_step_count=6))
