"""Redshift as a choice of the settings: which resource stands behind the windows, and how its address is read."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.settings import load_settings
from lockstep.warehouse.dialect import Step
from lockstep.warehouse.redshift import CLAIM
from lockstep.warehouse.session import Session
from resources.assembly import build_resources
from resources.redshift import RedshiftWindowsResource, client_resource, open_connection
from resources.windows import WindowsResource

DSN = "postgresql://loader:p%40ss@cluster.example.com:5440/warehouse?sslmode=verify-full"


def test_the_dialect_of_the_settings_decides_which_warehouse_windows_go_to():
    chosen = load_settings(warehouse_dialect="redshift", warehouse_dsn=DSN, warehouse_iam_role="arn:x")
    windows = build_resources(chosen)["windows"]
    assert isinstance(windows, RedshiftWindowsResource)
    assert windows.iam_role == "arn:x"
    assert type(build_resources(load_settings())["windows"]) is WindowsResource


@pytest.mark.parametrize("dialect", ["postgres", "redshift"])
def test_the_bucket_of_raw_windows_is_that_of_the_settings_on_every_warehouse(dialect: str):
    """Guards deployments on AWS, where nobody else's bucket name can be had: one place that keeps its own is enough."""
    chosen = build_resources(load_settings(warehouse_dialect=dialect, warehouse_dsn=DSN, windows_bucket="acme-raw"))
    assert (chosen["vault_source"].bucket, chosen["windows"].bucket) == ("acme-raw", "acme-raw")


def test_the_address_becomes_the_resource_of_dagster_aws():
    arguments = client_resource(DSN).get_client().conn_args
    assert arguments == {
        "host": "cluster.example.com",
        "port": 5440,
        "user": "loader",
        "password": "p@ss",
        "database": "warehouse",
        "connect_timeout": 5,
        "sslmode": "verify-full",
    }


def test_a_warehouse_that_cannot_be_reached_is_tried_again_and_its_password_stays_unsaid():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Transient) as caught:
        open_connection(f"postgresql://me:topsecret@127.0.0.1:{port}/x?sslmode=disable")
    assert "topsecret" not in str(caught.value)


class ProgrammingError(Exception):
    """As redshift_connector raises it: the server's fields in a dictionary."""


class InterfaceError(Exception):
    """As both drivers raise it when the connection is gone."""


class _Cursor:
    description = None

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.rowcount = answer if isinstance(answer, int) else -1

    def execute(self, *_: Any) -> None:
        if isinstance(self._answer, Exception):
            raise self._answer

    def close(self) -> None:
        """Nothing is open."""


class _Connection:
    autocommit = False

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def cursor(self) -> _Cursor:
        return _Cursor(next(self._answers, 0))


@pytest.mark.parametrize(
    ("raised", "kind", "broken"),
    [
        (ProgrammingError({"C": "42P01", "M": "relation does not exist"}), Terminal, False),
        (ProgrammingError({"C": "XX000", "M": "1023\nDETAIL: Serializable isolation violation"}), Transient, False),
        (ProgrammingError({"C": "57P01", "M": "terminating connection"}), Transient, True),
        (InterfaceError("connection is closed"), Transient, True),
        (ValueError("a bug"), Terminal, False),
    ],
)
def test_a_driver_says_in_its_own_words_whether_trying_again_can_help(
    raised: Exception, kind: type[LockstepError], broken: bool
):
    session = Session(_Connection(raised))
    with pytest.raises(kind):
        session.execute("SELECT 1")
    assert session.broken is broken


def test_a_step_that_moves_nothing_is_a_lost_lane_and_any_other_count_is_an_error():
    with pytest.raises(LostClaim):
        Session(_Connection(0)).transact([Step("UPDATE x", {}, 1, CLAIM)], unit="u")
    with pytest.raises(Terminal, match="rows: 0 instead of 1"):
        Session(_Connection(0)).transact([Step("UPDATE x", {}, 1, "rows")], unit="u")
