"""The transactional writer as SQL for Redshift: what to run, in which order, on one connection.

What belongs here: statements as text with their parameters, the questions between them, the manifest that COPY reads.
What does not: a driver or a connection; whoever has one passes a function that asks it. Redshift enforces no primary
key, so the ledger is checked under a lock; TRUNCATE and ALTER TABLE APPEND commit what surrounds them and VACUUM
refuses a transaction, so none of them occurs here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lockstep.idempotency.overwrite import File
from lockstep.idempotency.transactional import COME_TOO_LATE, ContentChanged, Key, Outcome
from lockstep.kernel.errors import InvalidInput, LostClaim, Transient

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,126}")
_URL = re.compile(r"s3://[a-z0-9.-]{3,63}/[A-Za-z0-9!_.*()/=+-]+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")


class Statement(NamedTuple):
    """SQL with `%s` where a parameter is bound."""

    text: str
    parameters: tuple[object, ...] = ()


class Load(NamedTuple):
    """What is to be loaded. No manifest when there are no rows: COPY refuses an empty one."""

    rows: int
    content: str
    manifest_url: str | None


class Plan(NamedTuple):
    """One transaction in parts, with a question after each of the first two; `execute` runs it."""

    key: Key
    load: Load
    begin: tuple[Statement, ...]
    check: Statement
    stage: tuple[Statement, ...]
    verify: Statement
    apply: tuple[Statement, ...]
    commit: Statement = Statement("COMMIT")

    def all(self) -> tuple[Statement, ...]:
        """Every statement in order, for a look or a linter."""
        return (*self.begin, self.check, *self.stage, self.verify, *self.apply, self.commit)


Ask = Callable[[Statement], Sequence[Any] | None]
"""Executes one statement on the connection and returns the first row of its answer, if it has one."""

CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS idempotency.ledger (
    pipeline VARCHAR(512) NOT NULL, unit VARCHAR(512) NOT NULL, generation INTEGER NOT NULL,
    run VARCHAR(512) NOT NULL, content VARCHAR(512) NOT NULL, row_count BIGINT NOT NULL,
    applied_at TIMESTAMP DEFAULT GETDATE()
)"""
"""The ledger as Redshift has it, in schema `idempotency`: without a key, which Redshift would not enforce."""


def execute(ask: Ask, plan: Plan) -> Outcome:
    """Run the plan, or recognise that it was done: after a lost answer the same call finds the ledger row.

    Raises:
        ContentChanged: The key was applied with other rows.
        LostClaim: A newer generation of the unit was applied.
        Transient: The files did not give the announced rows.
        InvalidInput: Rows belong to another unit. In all of these cases nothing was changed.
    """
    try:
        for statement in plan.begin:  # inside: a LOCK that fails leaves a transaction, too
            ask(statement)
        entry = ask(plan.check)
        outcome = recognise(entry, plan) if entry is not None else _apply(ask, plan)
    except BaseException:
        with suppress(Exception):  # the connection may be gone, and with it the transaction
            ask(Statement("ROLLBACK"))
        raise
    ask(Statement("ROLLBACK") if outcome.already else plan.commit)
    return outcome


def recognise(entry: Sequence[Any], plan: Plan) -> Outcome:
    """What a row of `check`, the newest ledger entry at or above the key's generation, means for the plan."""
    generation, run, content, rows = entry
    if generation > plan.key.generation:
        raise LostClaim(
            f"generation {generation} was applied; nothing was changed.", unit=str(plan.key), next_step=COME_TOO_LATE
        )
    if content != plan.load.content:
        raise ContentChanged(
            f"it was applied by {run} with content {content}, not {plan.load.content}; nothing was changed.",
            unit=str(plan.key),
            next_step="for a deliberate replay with other rows raise the generation.",
        )
    return Outcome(int(rows), str(content), already=True)


def _apply(ask: Ask, plan: Plan) -> Outcome:
    for statement in plan.stage:
        ask(statement)
    staged, ours = ask(plan.verify) or (0, 0)
    if staged != plan.load.rows:
        raise Transient(
            f"COPY brought {staged} of {plan.load.rows} rows; nothing was changed.",
            unit=str(plan.key),
            next_step="write the files and their manifest anew.",
        )
    if ours != staged:
        raise InvalidInput(
            f"{staged - ours} rows belong to another unit than {plan.key.unit}; nothing was changed.",
            unit=str(plan.key),
            next_step="filter the rows by the unit's column.",
        )
    for statement in plan.apply:
        ask(statement)
    return Outcome(plan.load.rows, plan.load.content, already=False)


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
    unit = _name(unit_column)
    return Plan(
        key=key,
        load=load,
        begin=(Statement("BEGIN"), Statement("LOCK TABLE idempotency.ledger")),
        check=Statement(
            "SELECT generation, run, content, row_count FROM idempotency.ledger "
            "WHERE pipeline = %s AND unit = %s AND generation >= %s ORDER BY generation DESC",
            key,
        ),
        stage=(
            # ON COMMIT DROP is not known to Redshift, so a temporary table of an earlier try may still be there.
            Statement(f"DROP TABLE IF EXISTS {stage}"),
            Statement(f"CREATE TEMP TABLE {stage} (LIKE {table})"),
            *([_copy(stage, names, load.manifest_url, iam_role)] if load.manifest_url else []),
        ),
        verify=Statement(f"SELECT COUNT(*), COUNT(CASE WHEN {unit} = %s THEN 1 END) FROM {stage}", (key.unit,)),  # noqa: S608
        apply=(
            Statement(f"DELETE FROM {table} WHERE {unit} = %s", (key.unit,)),  # noqa: S608
            Statement(f"INSERT INTO {table} ({names}) SELECT {names} FROM {stage}"),  # noqa: S608
            Statement(
                "INSERT INTO idempotency.ledger (pipeline, unit, generation, run, content, row_count) "
                "VALUES (%s, %s, %s, %s, %s, %s)",
                (*key, run, load.content, load.rows),
            ),
        ),
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
