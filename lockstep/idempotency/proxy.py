"""Proxy: immutable versions behind a stable name, on PostgreSQL a view over sealed tables.

What belongs here: the rules of moving a name (shared with proxy_s3.py), adding, pointing, rolling back and collecting
versions. What does not: how a version is built; the caller's function does that once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from enum import Enum
from typing import NamedTuple

from psycopg import errors, sql

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.postgres import Connection, Pool, identifier, refuse_long_name, transaction

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))"
# The number at the end of a name is the order in which versions of one date were built.
_OF_RUN = """
SELECT version, logical_date, dropped_at IS NOT NULL, split_part(version, '_', -1)::int
FROM idempotency.proxy_version WHERE proxy = %s AND run = %s"""
_OF_NAME = """
SELECT version, logical_date, dropped_at IS NOT NULL, split_part(version, '_', -1)::int
FROM idempotency.proxy_version WHERE proxy = %s AND version = %s"""
# By the second, as names are: two logical dates of one second must not come to one name.
_COUNT = """
SELECT count(*) FROM idempotency.proxy_version WHERE proxy = %s AND left(logical_date, 19) = left(%s, 19)"""
_ADD = """
INSERT INTO idempotency.proxy_version (proxy, version, logical_date, run, sealed_at)
VALUES (%s, %s, %s, %s, clock_timestamp())"""
_MOVES = """
SELECT v.version, v.logical_date, v.dropped_at IS NOT NULL, split_part(v.version, '_', -1)::int
FROM idempotency.proxy_move m JOIN idempotency.proxy_version v USING (proxy, version)
WHERE m.proxy = %s ORDER BY m.id DESC"""
_MOVE = "INSERT INTO idempotency.proxy_move (proxy, version, reason) VALUES (%s, %s, %s)"
_OLD = """
SELECT version FROM idempotency.proxy_version WHERE proxy = %s AND dropped_at IS NULL AND sealed_at < %s
AND version <> ALL(%s) ORDER BY version"""
_DROPPED = "UPDATE idempotency.proxy_version SET dropped_at = clock_timestamp() WHERE proxy = %s AND version = %s"
_COLUMNS = """
SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""
_GRANTS = """
SELECT acl.privilege_type, CASE WHEN acl.grantee = 0 THEN NULL ELSE acl.grantee::regrole::text END, acl.is_grantable,
       held.attname
FROM (SELECT relacl AS acl, NULL AS attname FROM pg_class WHERE oid = %(view)s::regclass
      UNION ALL
      SELECT attacl, attname FROM pg_attribute WHERE attrelid = %(view)s::regclass AND attnum > 0) AS held,
     aclexplode(held.acl) AS acl"""

NOTHING_BEFORE = "there is no earlier version to go back to."


class Version(NamedTuple):
    """One immutable version, known by a name that was computed once and stored.

    `number` tells versions of one date apart by the order in which they were built; 0 where the store does not know.
    """

    name: str
    logical_date: str
    dropped: bool = False
    number: int = 0


class Decision(Enum):
    """What a wish to move the name comes to."""

    MOVE = "move"
    STAY = "stay"
    SUPERSEDED = "superseded"
    OLDER = "older"


class Refused(InvalidInput):
    """The name was not moved."""


@dataclass(frozen=True)
class Proxy:
    """A public view; its versions are tables `<name>_<logical date>_<n>` in the same schema."""

    schema: str
    name: str

    def __post_init__(self) -> None:
        refuse_long_name(self.name, longest_suffix=len("_20260302_000000_9999"))

    @property
    def key(self) -> str:
        """How the catalogue calls it."""
        return f"{self.schema}.{self.name}"


Build = Callable[[Connection, sql.Identifier], object]
"""Creates the table of the given name and fills it."""


def logical(moment: date | datetime) -> str:
    """A logical date as text whose order is the order of time. A bare date is its midnight in UTC."""
    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time(0), UTC)
    if moment.tzinfo is None:
        raise InvalidInput(f"{moment} has no time zone.", next_step="pass an aware datetime or a date.")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def decide(wanted: Version, moves: Sequence[Version], *, told: bool) -> Decision:
    """Whether the name may move. `moves` are the versions it pointed to, newest first; the first is where it is.

    Automatic moves never go back in time, and a run that is retried after a person rolled its version back, or after a
    corrected version of its date was built and shown, does not publish it again. Told means that a person decides
    otherwise.
    """
    current = moves[0] if moves else None
    if current is not None and current.name == wanted.name:
        return Decision.STAY
    if told or current is None:
        return Decision.MOVE
    if any(past.name == wanted.name for past in moves):
        return Decision.SUPERSEDED
    if wanted.logical_date == current.logical_date and wanted.number < current.number:
        return Decision.SUPERSEDED
    return Decision.OLDER if wanted.logical_date < current.logical_date else Decision.MOVE


def add_version(
    source: Connection | Pool, proxy: Proxy, logical_date: date | datetime, build: Build, *, run: str
) -> Version:
    """Build and seal a version in one transaction; a retry of the same run finds it and builds nothing."""
    with transaction(source, what=f"adding a version of {proxy.name}") as connection:
        connection.execute(_LOCK, (proxy.key,))
        known = connection.execute(_OF_RUN, (proxy.key, run)).fetchone()
        if known is not None:
            return Version(*known)
        moment = logical(logical_date)
        count = connection.execute(_COUNT, (proxy.key, moment)).fetchone()
        number = 1 + (count[0] if count else 0)
        version = Version(f"{proxy.name}_{moment[:19].translate(_COMPACT)}_{number}", moment, number=number)
        table = identifier(proxy.schema, version.name)
        build(connection, table)
        crash_point("proxy.version.built")
        _seal(connection, table, version.name)
        connection.execute(_ADD, (proxy.key, version.name, moment, run))
        crash_point("proxy.version.before_commit")
    crash_point("proxy.version.after_commit")
    return version


def point(source: Connection | Pool, proxy: Proxy, version: Version, *, reason: str, told: bool = False) -> Decision:
    """Let the name show this version. Safe to repeat; every move is recorded with its reason.

    Raises:
        Refused: The version is older than the one shown, or its table was collected.
        Terminal: Its columns differ and views of consumers stand on the name.
    """
    with transaction(source, what=f"pointing {proxy.name}") as connection:
        connection.execute(_LOCK, (proxy.key,))
        known = connection.execute(_OF_NAME, (proxy.key, version.name)).fetchone()
        if known is None or Version(*known).dropped:
            raise Refused(
                f"{version.name} does not exist any more, or never did.",
                unit=proxy.key,
                next_step="build it again under a new run.",
            )
        decision = decide(Version(*known), moves(connection, proxy), told=told)
        if decision is Decision.OLDER:
            raise refusal(proxy.key, version)
        if decision is Decision.MOVE:
            _show(connection, proxy, version.name)
            connection.execute(_MOVE, (proxy.key, version.name, reason))
        crash_point("proxy.point.before_commit")
    crash_point("proxy.point.after_commit")
    return decision


def roll_back(source: Connection | Pool, proxy: Proxy, *, reason: str) -> Version:
    """Point back to the version before the current one. Once more goes one further, never to what was rolled back."""
    with transaction(source, what=f"rolling back {proxy.name}") as connection:
        connection.execute(_LOCK, (proxy.key,))
        before = previous(moves(connection, proxy))
        if before is None:
            raise Refused(NOTHING_BEFORE, unit=proxy.key, next_step="build a good version and point to it.")
        point(connection, proxy, before, reason=reason, told=True)
    return before


def moves(connection: Connection, proxy: Proxy) -> list[Version]:
    """The versions that the name pointed to, newest first; the first is the current one."""
    return [Version(*row) for row in connection.execute(_MOVES, (proxy.key,)).fetchall()]


def collect(source: Connection | Pool, proxy: Proxy, *, keep: int, sealed_before: datetime) -> list[str]:
    """Drop old versions, never the current one, the `keep` last shown before it nor the `keep` a roll back goes to."""
    with transaction(source, what=f"collecting versions of {proxy.name}") as connection:
        connection.execute(_LOCK, (proxy.key,))
        kept = kept_versions(moves(connection, proxy), keep)
        old = [name for (name,) in connection.execute(_OLD, (proxy.key, sealed_before, kept)).fetchall()]
        for name in old:
            connection.execute(sql.SQL("DROP TABLE {}").format(identifier(proxy.schema, name)))
            connection.execute(_DROPPED, (proxy.key, name))
        crash_point("proxy.collect.before_commit")
    return old


def previous(shown: Sequence[Version]) -> Version | None:
    """Where a roll back goes: the version before the current one that still exists and was not rolled back itself."""
    return next((past for past in _way_back(shown)[1:] if not past.dropped), None)


def kept_versions(shown: Sequence[Version], keep: int) -> list[str]:
    """The current version, the `keep` different ones shown last before it, and the `keep` that roll backs go to."""
    if keep < 0:
        raise InvalidInput(f"{keep} versions cannot be kept.", next_step="name how many stay behind the current one.")
    recent = list(dict.fromkeys(version.name for version in shown))
    behind = [version.name for version in _way_back(shown) if not version.dropped]
    return list(dict.fromkeys([*recent[: keep + 1], *behind[: keep + 1]]))


def _way_back(shown: Sequence[Version]) -> list[Version]:
    """The current version and those under it, newest first. A move back to one of them takes off what lay above."""
    way: list[Version] = []
    for version in reversed(shown):
        names = [past.name for past in way]
        under = way[: names.index(version.name)] if version.name in names else way
        way = [*under, version]
    return way[::-1]


def refusal(unit: str, version: Version) -> Refused:
    """Why an old version is not published over a newer one."""
    return Refused(
        f"{version.name} of {version.logical_date} is older than the version shown; nothing was moved.",
        unit=unit,
        next_step="to go back on purpose, point with told=True or roll back.",
    )


_COMPACT = str.maketrans({"-": "", ":": "", "T": "_"})


def _seal(connection: Connection, table: sql.Identifier, name: str) -> None:
    connection.execute(sql.SQL("REVOKE INSERT, UPDATE, DELETE, TRUNCATE ON {} FROM PUBLIC, CURRENT_USER").format(table))
    connection.execute(
        sql.SQL(
            "CREATE TRIGGER {} BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {} "
            "FOR EACH STATEMENT EXECUTE FUNCTION idempotency.refuse_write()"
        ).format(identifier(f"sealed_{name}"[:63]), table)
    )


def _show(connection: Connection, proxy: Proxy, version: str) -> None:
    table, view = identifier(proxy.schema, version), identifier(proxy.schema, proxy.name)
    columns = [name for (name,) in connection.execute(_COLUMNS, (table.as_string(connection),)).fetchall()]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(map(identifier, columns)), table)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(view, query))
    except errors.InvalidTableDefinition:  # a column went, changed its name, its type or its place
        _show_anew(connection, proxy, view, query, columns)


def _show_anew(
    connection: Connection, proxy: Proxy, view: sql.Identifier, query: sql.Composed, columns: Sequence[str]
) -> None:
    grants = connection.execute(_GRANTS, {"view": view.as_string(connection)}).fetchall()
    try:
        connection.execute(sql.SQL("DROP VIEW {}").format(view))
    except errors.DependentObjectsStillExist as error:
        raise Terminal(
            f"the columns changed and consumers stand on the name: {error.diag.message_detail}; nothing was moved.",
            unit=proxy.key,
            next_step="keep the old columns in the new version, or let the consumers change first.",
        ) from error
    connection.execute(sql.SQL("CREATE VIEW {} AS {}").format(view, query))
    for privilege, grantee, grantable, column in grants:
        if column is None or column in columns:  # the right to a column that went goes with it
            connection.execute(
                sql.SQL("GRANT {}{} ON {} TO {}{}").format(
                    sql.SQL(privilege),
                    sql.SQL(" ({})").format(identifier(column)) if column else sql.SQL(""),
                    view,
                    sql.SQL("PUBLIC") if grantee is None else sql.SQL(grantee),
                    sql.SQL(" WITH GRANT OPTION" if grantable else ""),
                )
            )
