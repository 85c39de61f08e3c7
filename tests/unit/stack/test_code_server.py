"""The code server: runs are forked, and the place in Dagster where that is decided is still where it was."""

from __future__ import annotations

import inspect
import multiprocessing.forkserver
from typing import Any

import pytest
from dagster._grpc.server import DagsterApiServer

from stack import code_server


def test_the_server_of_the_dagster_in_use_keeps_its_start_method_where_it_is_replaced():
    """Guards an upgrade of Dagster: a renamed attribute would quietly bring back three seconds for every run."""
    source = inspect.getsource(DagsterApiServer)
    assert 'self._mp_ctx = multiprocessing.get_context("spawn")' in source
    assert "self._mp_ctx.Process(" in source


def test_runs_are_forked_from_a_process_that_has_the_definitions(monkeypatch: pytest.MonkeyPatch):
    def build(self: Any, *, built: str) -> None:
        self.built, self._mp_ctx = built, multiprocessing.get_context("spawn")

    begun: list[bool] = []
    monkeypatch.setattr(DagsterApiServer, "__init__", build)
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: begun.append(True))
    code_server.fork_runs()
    server: Any = DagsterApiServer(built="as before")  # type: ignore[call-arg]
    assert (server.built, begun) == ("as before", [True]), "the imports do not wait for the first run"
    assert server._mp_ctx.get_start_method() == "forkserver"
    assert multiprocessing.forkserver._forkserver._preload_modules == code_server.PRELOADED  # type: ignore[attr-defined]
