"""Who may send ticks: projects of organisations and their secrets, sealed at rest.

What belongs here: making, checking, rotating and revoking, each with a line of audit. What does not: HTTP headers and
answers (services/ingest). A secret can be read once, when it is made.
"""

from __future__ import annotations

import hmac
import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from psycopg.types.json import Jsonb
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput, LockstepError, Terminal
from lockstep.kernel.postgres import Connection, Pool, transaction
from lockstep.ticks.model import Project
from lockstep.ticks.rules import check_id, is_id

ROTATION_HOURS = 24.0

_SECRET = re.compile(r"lts_(?P<id>[0-9a-f]{12})_[A-Za-z0-9_-]{43}", re.ASCII)
# Compared against when no row matches, so that a wrong id and a wrong secret take the same path.
_NOBODY = secrets.token_urlsafe(48)

_PROJECT = "p.project_id, p.org_id, p.sequence, p.head_tick_id, p.tables, p.created_at, p.revoked_at"
_ADD = "INSERT INTO ticks.project (project_id, org_id, tables) VALUES (%s, %s, %s)"
_ADD_SECRET = "INSERT INTO ticks.secret (secret_id, project_id, sealed) VALUES (%s, %s, %s)"  # noqa: S105
_LIST = f"""
SELECT {_PROJECT}, count(s.secret_id) FILTER (WHERE s.revoked_at IS NULL
       AND (s.expires_at IS NULL OR s.expires_at > clock_timestamp()))
  FROM ticks.project AS p LEFT JOIN ticks.secret AS s USING (project_id)
 GROUP BY p.project_id ORDER BY p.org_id, p.created_at, p.project_id"""  # noqa: S608
_GET = f"SELECT {_PROJECT} FROM ticks.project AS p WHERE p.project_id = %s"  # noqa: S608
_LOCK = f"{_GET} AND p.revoked_at IS NULL FOR UPDATE"
_FIND = f"""
SELECT s.sealed, {_PROJECT} FROM ticks.secret AS s JOIN ticks.project AS p USING (project_id)
 WHERE s.secret_id = %s AND s.revoked_at IS NULL AND p.revoked_at IS NULL
   AND (s.expires_at IS NULL OR s.expires_at > clock_timestamp())"""  # noqa: S608
# Two secrets work during a rotation: the new one, and the newest of the old ones until it expires.
_RETIRE = """
UPDATE ticks.secret SET expires_at = least(coalesce(expires_at, 'infinity'), clock_timestamp() + %(overlap)s),
       revoked_at = CASE WHEN secret_id = %(kept)s THEN NULL ELSE clock_timestamp() END
 WHERE project_id = %(project)s AND revoked_at IS NULL"""
_NEWEST = """
SELECT secret_id FROM ticks.secret WHERE project_id = %s AND revoked_at IS NULL
   AND (expires_at IS NULL OR expires_at > clock_timestamp()) ORDER BY created_at DESC, secret_id LIMIT 1"""
_REVOKE_SECRETS = "UPDATE ticks.secret SET revoked_at = clock_timestamp() WHERE project_id = %s AND revoked_at IS NULL"
_REVOKE = "UPDATE ticks.project SET revoked_at = clock_timestamp() WHERE project_id = %s AND revoked_at IS NULL"
_AUDIT = "INSERT INTO ticks.audit (actor, action, subject, details) VALUES (%s, %s, %s, %s)"


class Keyring:
    """Seals and opens secrets. The first key seals; all of them open, so that keys can be changed one by one."""

    def __init__(self, keys: SecretStr | None) -> None:
        names = [key.strip() for key in (keys.get_secret_value() if keys else "").split(",") if key.strip()]
        try:
            self._fernet = MultiFernet([Fernet(key) for key in names])
        except ValueError:
            raise InvalidInput(
                "LOCKSTEP_TICKS_KEYS holds no usable Fernet key.",
                next_step="start the stack, or make one: 32 random bytes in url-safe base64.",
            ) from None

    def seal(self, secret: str) -> bytes:
        """What may be stored."""
        return self._fernet.encrypt(secret.encode())

    def open(self, sealed: bytes) -> str:
        """The secret, or `Terminal` when it was sealed with a key that is no longer known."""
        try:
            return self._fernet.decrypt(sealed).decode()
        except InvalidToken:
            raise Terminal(
                "a secret was sealed with a key that is not known here.",
                next_step="add the old key to LOCKSTEP_TICKS_KEYS, or rotate the project's secret.",
            ) from None


@dataclass(frozen=True)
class NewSecret:
    """A project at the one moment when its secret can be read."""

    org_id: str
    project_id: str
    api_secret: str


@dataclass(frozen=True)
class ListedProject:
    """A project as an operator sees it: how many secrets open it, and none of them."""

    project: Project
    secrets: int


class ProjectStore:
    """Projects in the tables `ticks.project` and `ticks.secret`."""

    def __init__(self, source: Pool | Connection, keyring: Keyring) -> None:
        self._source, self._keyring = source, keyring

    def add(
        self, org_id: str, project_id: str | None = None, *, tables: tuple[str, ...] | None = None, actor: str
    ) -> NewSecret:
        """Make a project and its first secret. Raises `InvalidInput` for bad ids or a project that exists.

        Args:
            org_id: The organisation; what its agents send as X-Api-Key.
            project_id: Its UUID; a new one if none is given.
            tables: The only tables that its ticks may have; None allows any name.
            actor: Who does this, for the audit.
        """
        check_id("org_id", org_id)
        project_id = check_id("project_id", str(project_id or uuid.uuid4()).lower())
        for table in tables or ():
            check_id("table", table)
        with _unless_taken(project_id), transaction(self._source, what="adding a project") as connection:
            connection.execute(_ADD, (project_id, org_id, list(tables) if tables else None))
            secret = self._new_secret(connection, project_id)
            audit(connection, actor, "project.add", project_id, {"org_id": org_id})
        return NewSecret(org_id, project_id, secret)

    def list(self) -> list[ListedProject]:
        """Every project, the revoked ones too."""
        with transaction(self._source, what="listing projects") as connection:
            rows = connection.execute(_LIST).fetchall()
        return [ListedProject(_project(row[:-1]), row[-1]) for row in rows]

    def get(self, project_id: str) -> Project | None:
        """One project, also a revoked one."""
        with transaction(self._source, what="reading a project") as connection:
            row = connection.execute(_GET, (project_id,)).fetchone()
        return _project(row) if row else None

    def rotate(self, project_id: str, *, overlap: timedelta, actor: str) -> NewSecret:
        """Make a new secret. The one before it works for `overlap` longer; any older one ends now."""
        with transaction(self._source, what="rotating a secret") as connection:
            project = self._lock(connection, project_id)
            newest = connection.execute(_NEWEST, (project_id,)).fetchone()
            kept = newest[0] if newest else ""
            connection.execute(_RETIRE, {"overlap": overlap, "kept": kept, "project": project_id})
            secret = self._new_secret(connection, project_id)
            audit(connection, actor, "project.rotate", project_id, {"overlap_seconds": overlap.total_seconds()})
        return NewSecret(project.org_id, project_id, secret)

    def revoke(self, project_id: str, *, actor: str) -> None:
        """Refuse the project from now on. Its ticks stay, and silver goes on with them."""
        with transaction(self._source, what="revoking a project") as connection:
            self._lock(connection, project_id)
            connection.execute(_REVOKE_SECRETS, (project_id,))
            connection.execute(_REVOKE, (project_id,))
            audit(connection, actor, "project.revoke", project_id, {})

    def authenticate(self, org_id: str | None, secret: str | None) -> Project | None:
        """The project that this organisation and secret stand for, or None. Takes as long wherever they differ."""
        match = _SECRET.fullmatch(secret or "")
        if match is None or not is_id("org_id", org_id):
            return None
        with transaction(self._source, what="checking a secret") as connection:
            row = connection.execute(_FIND, (match["id"],)).fetchone()
        known = self._keyring.open(bytes(row[0])) if row else _NOBODY
        same_secret = hmac.compare_digest(str(secret).encode(), known.encode())
        same_org = hmac.compare_digest(str(org_id).encode(), (row[2] if row else _NOBODY).encode())
        return _project(row[1:]) if row and same_secret and same_org else None

    def _new_secret(self, connection: Connection, project_id: str) -> str:
        identity = secrets.token_hex(6)
        secret = f"lts_{identity}_{secrets.token_urlsafe(32)}"
        connection.execute(_ADD_SECRET, (identity, project_id, self._keyring.seal(secret)))
        return secret

    def _lock(self, connection: Connection, project_id: str) -> Project:
        row = connection.execute(_LOCK, (project_id,)).fetchone()
        if row is None:
            raise InvalidInput("there is no such active project.", unit=project_id, next_step="see project list.")
        return _project(row)


def audit(connection: Connection, actor: str, action: str, subject: str, details: dict[str, Any]) -> None:
    """Say inside the caller's transaction who did what to which unit."""
    connection.execute(_AUDIT, (actor, action, subject, Jsonb(details)))


@contextmanager
def _unless_taken(project_id: str) -> Iterator[None]:
    try:
        yield
    except LockstepError as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        raise InvalidInput(
            "the project exists.", unit=project_id, next_step="choose another id, or rotate its secret."
        ) from None


def _project(row: Any) -> Project:
    project, org, sequence, head, tables, created, revoked = row
    return Project(project, org, sequence, head, tuple(tables) if tables else None, created, revoked)
