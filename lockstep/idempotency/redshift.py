"""The transactional writer as SQL for Redshift: what to run, in which order, on one connection.

What belongs here: statements as text with their parameters, and the manifest that COPY reads. What does not: a driver
or a connection. Redshift enforces no primary key, so the ledger is checked under a lock; TRUNCATE and ALTER TABLE
APPEND commit what surrounds them and VACUUM refuses a transaction, so none of them occurs here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.idempotency.overwrite import File
from lockstep.idempotency.transactional import Key
from lockstep.kernel.errors import InvalidInput

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,126}")
_URL = re.compile(r"s3://[a-z0-9.-]{3,63}/[A-Za-z0-9!_.*()/=+-]+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")


class Statement(NamedTuple):
    """SQL with `%s` where a parameter is bound."""

    text: str
    parameters: tuple[object, ...] = ()


class Plan(NamedTuple):
    """One transaction. Run `begin`, then `check`; go on with `apply` only if `check` returned no row, else roll back.

    A row of `check` is the ledger entry (run, content, row_count) of whoever applied the key, or a newer generation,
    before.
    """

    begin: tuple[Statement, ...]
    check: Statement
    apply: tuple[Statement, ...]
    commit: Statement = Statement("COMMIT")

    def all(self) -> tuple[Statement, ...]:
        """Every statement in order, for a look or a linter."""
        return (*self.begin, self.check, *self.apply, self.commit)


class Load(NamedTuple):
    """What is to be loaded. No manifest when there are no rows: COPY refuses an empty one."""

    rows: int
    content: str
    manifest_url: str | None


def manifest(bucket: str, files: Sequence[File]) -> dict[str, Any]:
    """What COPY must load: exactly these objects with exactly these sizes, or it fails."""
    return {
        "entries": [
            {"url": f"s3://{bucket}/{file.key}", "mandatory": True, "meta": {"content_length": file.size}}
            for file in files
        ]
    }


def plan(
    target: Sequence[str],
    columns: Sequence[str],
    key: Key,
    *,
    run: str,
    load: Load,
    unit_column: str,
    iam_role: str,
) -> Plan:
    """Replace the rows of one unit by the files of a manifest, and record it, in one transaction.

    Args:
        target: Schema and table.
        columns: Columns in the order of the files.
        key: What is applied at most once.
        run: Who writes.
        load: The files of the unit, and the fingerprint of their rows.
        unit_column: Column of the target that holds the unit's name.
        iam_role: The role that may read it.
    """
    table = ".".join(map(_name, target))
    names = ", ".join(map(_name, columns))
    stage = _name(f"stage_{target[-1]}")
    apply = [
        # ON COMMIT DROP is not known to Redshift, so a temporary table of an earlier try may still be there.
        Statement(f"DROP TABLE IF EXISTS {stage}"),
        Statement(f"CREATE TEMP TABLE {stage} (LIKE {table})"),
        *([_copy(stage, names, load.manifest_url, iam_role)] if load.manifest_url else []),
        Statement(f"DELETE FROM {table} WHERE {_name(unit_column)} = %s", (key.unit,)),  # noqa: S608
        Statement(f"INSERT INTO {table} ({names}) SELECT {names} FROM {stage}"),  # noqa: S608
        Statement(
            "INSERT INTO idempotency.ledger (pipeline, unit, generation, run, content, row_count) "
            "VALUES (%s, %s, %s, %s, %s, %s)",
            (*key, run, load.content, load.rows),
        ),
    ]
    return Plan(
        begin=(Statement("BEGIN"), Statement("LOCK TABLE idempotency.ledger")),
        check=Statement(
            "SELECT run, content, row_count FROM idempotency.ledger "
            "WHERE pipeline = %s AND unit = %s AND generation >= %s ORDER BY generation DESC",
            key,
        ),
        apply=tuple(apply),
    )


def _copy(stage: str, names: str, url: str, role: str) -> Statement:
    problems = [f"{url}: not the address of an S3 object"] if _URL.fullmatch(url) is None else []
    problems += [f"{role}: not the name of an IAM role"] if _ROLE.fullmatch(role) is None else []
    if problems:
        raise InvalidInput("COPY takes no parameters, and these cannot stand in its text.", problems=problems)
    return Statement(f"COPY {stage} ({names}) FROM '{url}' IAM_ROLE '{role}' FORMAT AS CSV MANIFEST")


def _name(part: str) -> str:
    if _NAME.fullmatch(part) is None:
        raise InvalidInput(f"{part!r} is not a name for Redshift.", next_step="use lower-case letters, digits and _.")
    return f'"{part}"'
