"""The API reference in docs/api is what `lockstep docs api` writes from the services' own OpenAPI documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services import reference
from services.cli import docs


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """What the services say now."""
    return reference.pages()


@pytest.mark.parametrize("name", ["README.md", *(f"{service}.md" for service in reference.SERVICES)])
def test_the_committed_page_is_the_one_that_the_command_writes(name: str, pages: dict[str, str]):
    """Guards a reference that describes an older service. If this fails: `lockstep docs api`, look, commit."""
    assert (reference.FOLDER / name).read_text() == pages[name]


def test_no_other_page_is_in_the_folder(pages: dict[str, str]):
    assert {page.name for page in reference.FOLDER.iterdir()} == set(pages)


def test_the_command_writes_all_pages_and_removes_old_ones(tmp_path: Path, pages: dict[str, str]):
    (tmp_path / "gone.md").write_text("a service that no longer exists")
    done = CliRunner().invoke(docs, ["api", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {page.name: page.read_text() for page in tmp_path.iterdir()} == pages


@pytest.mark.parametrize("service", reference.SERVICES)
def test_every_operation_and_schema_is_on_the_page(service: str, pages: dict[str, str]):
    openapi = reference.document(service)
    text = pages[f"{service}.md"]
    for path, methods in openapi["paths"].items():
        for method in methods:
            assert f"\n## {method.upper()} {path}\n" in text
    for schema in openapi["components"]["schemas"]:
        assert f"\n### {schema}\n" in text
