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
from tests.contract_hooks import fresh_key
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
                exports_requests_per_minute=1_000_000,
            )
        )
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", module_world.client.api_key
        server.should_exit = True
        thread.join(timeout=30)


CONTRACT = schemathesis.openapi.from_dict(create_app(load_settings()).openapi()).exclude(tag="operations")


@CONTRACT.parametrize()
@CALM
def test_every_operation_keeps_its_contract(served: tuple[str, str], case: Any):
    """Guards statuses, headers, schemas, refusals and authentication of every route at once."""
    address, key = served
    fresh_key(case)
    case.call_and_validate(base_url=address, headers={"X-Api-Key": key})


def test_conversations_along_the_links_keep_the_contract(served: tuple[str, str]):
    """Guards what only a sequence shows: submit, read, cancel, retry in any order."""
    address, key = served

    class Conversation(CONTRACT.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Any) -> None:
            fresh_key(case)

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"base_url": address, "headers": {"X-Api-Key": key}}

    Conversation.run(settings=settings(CALM, max_examples=10, stateful_step_count=6))
