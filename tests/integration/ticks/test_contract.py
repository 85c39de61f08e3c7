"""The OpenAPI document against the service that it describes, by machine."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from lockstep.kernel.settings import load_settings
from services.ingest import create_app
from tests.ticks_fixtures import sha256
from tests.ticks_world import Sender, World

pytestmark = pytest.mark.stack

CALM = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
CONTRACT = schemathesis.openapi.from_dict(create_app(load_settings()).openapi()).exclude(tag="operations")


@pytest.fixture(scope="module")
def project(world: World) -> Sender:
    return world.sender()


@CONTRACT.parametrize()
@CALM
def test_every_operation_keeps_its_contract(world: World, project: Sender, case: Any):
    """Guards statuses, headers, schemas, refusals and authentication of every route at once."""
    case.call_and_validate(base_url=world.url, headers=project.headers)


@CONTRACT.include(path_regex="^/v1/projects").parametrize()
@CALM
def test_every_operation_keeps_its_contract_inside_the_project(world: World, project: Sender, case: Any):
    """The same past the door: with the project that the secret opens, and with digests that are right.

    One check is left out: a manifest must name its own address and a digest its own body, which no schema can say.
    """
    case.path_parameters["project_id"] = project.secret.project_id
    if case.method == "PUT" and isinstance(case.body, bytes):
        case.headers = {**(case.headers or {}), "X-Sha256": sha256(case.body)}
    case.call_and_validate(base_url=world.url, headers=project.headers, excluded_checks=(positive_data_acceptance,))


def test_the_document_names_every_answer_of_the_original_contract():
    paths = create_app(load_settings()).openapi()["paths"]
    tick = "/v1/projects/{project_id}/ticks/{tick_id}"
    assert {"200", "202", "409", "411", "413"} <= set(paths[f"{tick}/parts/{{file_seq}}"]["put"]["responses"])
    assert {"200", "409", "422", "425", "503"} <= set(paths[f"{tick}/finalize"]["post"]["responses"])
    assert {"get", "delete"} <= set(paths[tick])
