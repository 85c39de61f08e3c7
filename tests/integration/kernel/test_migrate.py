"""Migrations on a real PostgreSQL: applied once, in order, by however many replicas start together."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import psycopg
import pytest

from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.migrate import migrate

pytestmark = pytest.mark.stack


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A package of its own for each test, on the import path, with two migrations."""
    name = f"shop_{zlib.crc32(request.node.nodeid.encode())}"
    folder = tmp_path / name / "migrations"
    folder.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("")
    (folder / "0001_orders.sql").write_text("CREATE TABLE orders (id int PRIMARY KEY, note text DEFAULT '100%');\n")
    (folder / "0002_lines.sql").write_text("ALTER TABLE orders ADD lines int; CREATE INDEX ON orders (lines);\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def name_of(package: Path) -> str:
    return package.parent.name


def test_migrations_run_in_order_in_the_schema_of_their_package(database: str, package: Path) -> None:
    applied = migrate(database, name_of(package))
    assert [(one.version, one.name) for one in applied] == [(1, "orders"), (2, "lines")]
    with psycopg.connect(database) as connection:
        connection.execute(f"SELECT id, lines FROM {name_of(package)}.orders")  # noqa: S608


def test_running_twice_changes_nothing(database: str, package: Path) -> None:
    migrate(database, name_of(package))
    assert migrate(database, name_of(package)) == []


def test_a_new_number_is_applied_alone(database: str, package: Path) -> None:
    migrate(database, name_of(package))
    (package / "0003_more.sql").write_text("ALTER TABLE orders ADD more int;")
    assert [one.version for one in migrate(database, name_of(package))] == [3]


def test_a_changed_file_is_refused_and_nothing_is_applied(database: str, package: Path) -> None:
    """Editing an applied file makes two databases of one release differ, unnoticed until a failover."""
    migrate(database, name_of(package))
    (package / "0001_orders.sql").write_text("CREATE TABLE orders (id bigint PRIMARY KEY);")
    (package / "0003_more.sql").write_text("ALTER TABLE orders ADD more int;")
    with pytest.raises(InvalidInput, match="0001_orders: changed"):
        migrate(database, name_of(package))
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM lockstep_migrations").fetchone() == (2,)


def test_other_line_ends_are_not_a_change(database: str, package: Path) -> None:
    migrate(database, name_of(package))
    file = package / "0001_orders.sql"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert migrate(database, name_of(package)) == []


@pytest.mark.parametrize("change", ["rename", "remove"])
def test_a_renamed_or_removed_file_is_refused(database: str, package: Path, change: str) -> None:
    migrate(database, name_of(package))
    last = package / "0002_lines.sql"
    last.rename(package / "0002_other.sql") if change == "rename" else last.unlink()
    with pytest.raises(InvalidInput, match="0002_lines"):
        migrate(database, name_of(package))


def test_a_broken_file_leaves_the_ones_before_it_applied(database: str, package: Path) -> None:
    (package / "0003_broken.sql").write_text("ALTER TABLE orders ADD half int; SELECT nonsense;")
    with pytest.raises(Terminal, match="nonsense"):
        migrate(database, name_of(package))
    (package / "0003_broken.sql").write_text("ALTER TABLE orders ADD half int;")
    assert [one.version for one in migrate(database, name_of(package))] == [3]


def test_a_connection_inside_a_transaction_is_refused(database: str, package: Path) -> None:
    """Each file would become a savepoint of a transaction that may still roll back."""
    with psycopg.connect(database) as connection, pytest.raises(InvalidInput, match="autocommit"):
        migrate(connection, name_of(package))


def test_four_replicas_starting_together_apply_each_file_once(database: str, package: Path) -> None:
    (package / "0003_slow.sql").write_text("SELECT pg_sleep(0.3); CREATE TABLE once (id int);")
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]);"
        "from lockstep.kernel.migrate import migrate; print(len(migrate(sys.argv[1], sys.argv[2])))"
    )
    command = [sys.executable, "-c", code]
    replicas = [
        subprocess.Popen(
            [*command, database, name_of(package), str(package.parents[1])], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    counts = sorted(int(replica.communicate(timeout=120)[0]) for replica in replicas)
    assert counts == [0, 0, 0, 3]


def test_the_kernel_migrates_itself(database: str) -> None:
    assert [one.version for one in migrate(database, "lockstep.kernel")] == [1, 2, 3]
    assert migrate(database, "lockstep.kernel") == []
