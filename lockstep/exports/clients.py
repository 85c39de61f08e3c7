"""Who may ask: API keys, hashed at rest, shown once.

What belongs here: making, checking, listing and revoking clients. What does not: HTTP headers and answers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime

import psycopg

from lockstep.exports.model import DEFAULT_TENANT, Client
from lockstep.exports.rules import TENANT_PATTERN
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import Connection, Pool, transaction

_KEY = re.compile(r"lsk_(?P<client>[0-9a-f]{12})_(?P<secret>[A-Za-z0-9_-]{43})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}", re.ASCII)
# Compared against when no client matches, so that a wrong id and a wrong secret take the same path.
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).digest()

_ADD = """
INSERT INTO exports.client (client_id, name, tenant, key_sha256, webhook_secret) VALUES (%s, %s, %s, %s, %s)"""
_FIND = """
SELECT client_id, name, tenant, key_sha256 FROM exports.client WHERE client_id = %s AND revoked_at IS NULL"""
_LIST = "SELECT client_id, name, tenant, created_at, revoked_at FROM exports.client ORDER BY created_at, client_id"
_REVOKE = """
UPDATE exports.client SET revoked_at = clock_timestamp()
 WHERE (name = %(who)s OR client_id = %(who)s) AND revoked_at IS NULL"""
_SECRET = "SELECT webhook_secret FROM exports.client WHERE client_id = %s"  # noqa: S105
_SECRET_OF_JOB = "SELECT webhook_secret FROM exports.client JOIN exports.job USING (client_id) WHERE job_id = %s"  # noqa: S105


@dataclass(frozen=True)
class NewClient:
    """A client at the one moment when its key can be read."""

    client: Client
    api_key: str


@dataclass(frozen=True)
class ListedClient:
    """A client as an operator sees it, without any secret."""

    client: Client
    created_at: datetime
    revoked_at: datetime | None


class ClientStore:
    """Clients in the table `exports.client`."""

    def __init__(self, source: Pool | Connection) -> None:
        self._source = source

    def add(self, name: str, tenant: str = DEFAULT_TENANT) -> NewClient:
        """Make a client and its key. Raises `InvalidInput` for a bad or used name."""
        problems = [] if _NAME.fullmatch(name) else ["name: 1 to 64 letters, digits, blanks or . _ @ -"]
        problems += [] if re.fullmatch(TENANT_PATTERN, tenant) else ["tenant: a-z, 0-9, -, starting with a letter"]
        if problems:
            raise InvalidInput("the client cannot be added.", unit=name[:64], problems=problems)
        client = Client(secrets.token_hex(6), name, tenant)
        secret = secrets.token_urlsafe(32)
        webhook = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        try:
            with transaction(self._source, what="adding a client") as connection:
                connection.execute(_ADD, (client.client_id, name, tenant, _digest(secret), webhook))
        except Exception as error:
            if isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                raise InvalidInput(
                    f"a client {name} exists.", unit=name, next_step="choose another name, or revoke it first."
                ) from None
            raise
        return NewClient(client, f"lsk_{client.client_id}_{secret}")

    def authenticate(self, api_key: str | None) -> Client | None:
        """The client behind a key, or None. The comparison takes the same time wherever they differ."""
        match = _KEY.fullmatch(api_key or "")
        if match is None:
            return None
        with transaction(self._source, what="checking an API key") as connection:
            row = connection.execute(_FIND, (match["client"],)).fetchone()
        known = bytes(row[3]) if row else _NOBODY
        same = hmac.compare_digest(_digest(match["secret"]), known)
        return Client(row[0], row[1], row[2]) if same and row else None

    def list(self) -> list[ListedClient]:
        """Every client, the revoked ones too."""
        with transaction(self._source, what="listing clients") as connection:
            rows = connection.execute(_LIST).fetchall()
        return [ListedClient(Client(*row[:3]), row[3], row[4]) for row in rows]

    def revoke(self, who: str) -> None:
        """End a client by name or id. Its jobs go on; its key is refused from now on."""
        with transaction(self._source, what="revoking a client") as connection:
            if connection.execute(_REVOKE, {"who": who}).rowcount == 0:
                raise InvalidInput("there is no such active client.", unit=who, next_step="see client list.")

    def webhook_secret(self, client_id: str) -> str:
        """The key with which a client checks signatures."""
        with transaction(self._source, what="reading a webhook secret") as connection:
            row = connection.execute(_SECRET, (client_id,)).fetchone()
        if row is None:
            raise InvalidInput("there is no such client.", unit=client_id)
        return str(row[0])

    def webhook_secret_of_job(self, job_id: str) -> str | None:
        """The key that signs the messages of a job."""
        with transaction(self._source, what="reading a webhook secret") as connection:
            row = connection.execute(_SECRET_OF_JOB, (job_id,)).fetchone()
        return None if row is None else str(row[0])


def _digest(secret: str) -> bytes:
    # A plain hash is enough: the secret has 256 random bits, so there is nothing to guess slowly.
    return hashlib.sha256(secret.encode()).digest()
