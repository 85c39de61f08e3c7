"""The registry of vaults in PostgreSQL, and the login of each from the environment.

What belongs here: which vaults there are, at which address, and how a login is found. What does not: talking to a vault
(lockstep/windows/client.py). A password is never written anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import Connection, Pool, transaction
from lockstep.windows.model import check_vault_id

_ADD = """
INSERT INTO vaults.registry (id, url, added_by) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET url = EXCLUDED.url, added_by = EXCLUDED.added_by
RETURNING id, url, added_by, added_at"""
_LIST = "SELECT id, url, added_by, added_at FROM vaults.registry ORDER BY id"
_REMOVE = "DELETE FROM vaults.registry WHERE id = %s"


@dataclass(frozen=True)
class RegisteredVault:
    """A vault the platform reads from."""

    id: str
    url: str
    added_by: str
    added_at: datetime


@dataclass(frozen=True)
class Login:
    """How to log in to a vault."""

    user: str
    password: SecretStr


class VaultRegistry:
    """The table of vaults. `source` is a connection or a pool, given by the caller."""

    def __init__(self, source: Connection | Pool) -> None:
        self._source = source

    def add(self, vault: str, url: str, *, actor: str) -> RegisteredVault:
        """Register a vault, or give a known one a new address. Refuses what is not an http(s) address."""
        check_vault_id(vault)
        with transaction(self._source, what="registering a vault") as connection:
            found = connection.execute(_ADD, (vault, check_url(url), actor)).fetchone()
        assert found is not None  # noqa: S101  # an upsert returns its row
        return RegisteredVault(*found)

    def vaults(self) -> list[RegisteredVault]:
        """All vaults, by id."""
        with transaction(self._source, what="reading the vaults") as connection:
            return [RegisteredVault(*row) for row in connection.execute(_LIST).fetchall()]

    def remove(self, vault: str) -> bool:
        """Forget a vault; its windows, raw files and warehouse tables stay. False if it was not known."""
        with transaction(self._source, what="removing a vault") as connection:
            return connection.execute(_REMOVE, (vault,)).rowcount == 1


def check_url(url: str) -> str:
    """The address without a closing slash, or `InvalidInput`. A login in the address would end up in logs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(f"{url!r} is not an http(s) address.", next_step="write https://myvault.veevavault.com.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidInput(
            "a vault's address carries no login, query or fragment.",
            next_step="put the login into the environment: see `lockstep vaults add --help`.",
        )
    return url.rstrip("/")


def login_of(vault: str, environment: Mapping[str, str]) -> Login:
    """The login of a vault: its own two variables, else the common ones. Raises `InvalidInput` that names them."""
    own = variable_prefix(vault)
    for prefix in (own, "LOCKSTEP_VAULT"):
        user, password = environment.get(f"{prefix}_USER"), environment.get(f"{prefix}_PASSWORD")
        if user and password:
            return Login(user, SecretStr(password))
    raise InvalidInput(
        "no login is set.",
        unit=f"vault {vault}",
        next_step=f"set {own}_USER and {own}_PASSWORD; LOCKSTEP_VAULT_USER and LOCKSTEP_VAULT_PASSWORD serve all.",
    )


def variable_prefix(vault: str) -> str:
    """How the variables of a vault begin, for example LOCKSTEP_VAULT_1000020."""
    return "LOCKSTEP_VAULT_" + check_vault_id(vault).upper().replace("-", "_")
