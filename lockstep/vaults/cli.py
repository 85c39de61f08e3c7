"""The commands `lockstep vaults …`: which vaults the platform reads from. Words and tables only."""

from __future__ import annotations

import getpass
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import connect
from lockstep.kernel.settings import load_settings
from lockstep.vaults.registry import RegisteredVault, VaultRegistry, login_of, variable_prefix

vaults = typer.Typer(name="vaults", help="The vaults that the platform reads from.", no_args_is_help=True)
console = Console(width=None if sys.stdout.isatty() else 160)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
VaultId = Annotated[str, typer.Option("--id", help="The vendor's id of the vault.")]


@vaults.command()
def add(
    vault_id: VaultId,
    url: Annotated[str, typer.Option("--url", help="The vault's address, without /api.")],
    as_json: Json = False,
) -> None:
    """Register a vault. Its login comes from LOCKSTEP_VAULT_<ID>_USER and LOCKSTEP_VAULT_<ID>_PASSWORD."""
    with _registry() as registry:
        added = registry.add(vault_id, url, actor=getpass.getuser())
    _print([added], as_json, one=True)


@vaults.command("list")
def list_vaults(as_json: Json = False) -> None:
    """Show every registered vault and whether its login is set here."""
    with _registry() as registry:
        _print(registry.vaults(), as_json)


@vaults.command()
def remove(vault_id: VaultId, as_json: Json = False) -> None:
    """Stop reading from a vault. Its windows, raw files and warehouse tables stay."""
    with _registry() as registry:
        if not registry.remove(vault_id):
            raise InvalidInput(f"there is no vault {vault_id}.", next_step="see `lockstep vaults list`.")
    if as_json:
        print(json.dumps({"id": vault_id, "removed": True}))
    else:
        console.print(f"vault {vault_id} is no longer read; its data stays.")


@contextmanager
def _registry() -> Iterator[VaultRegistry]:
    from stack.environment import adopt  # keeps `import lockstep` free of the stack

    adopt(load_settings())
    dsn = load_settings().postgres_dsn
    if dsn is None:
        raise InvalidInput("no database is known.", next_step="start the stack with `lockstep up`.")
    with connect(dsn, application_name="lockstep-vaults") as connection:
        yield VaultRegistry(connection)


def _print(found: list[RegisteredVault], as_json: bool, *, one: bool = False) -> None:
    described = [
        {
            "id": vault.id,
            "url": vault.url,
            "added_by": vault.added_by,
            "added_at": vault.added_at.isoformat(),
            "login": _login_state(vault.id),
        }
        for vault in found
    ]
    if as_json:
        print(json.dumps(described[0] if one else described, indent=2))
        return
    if not described:
        console.print("No vault is registered. Add one with `lockstep vaults add --id … --url …`.")
        return
    table = Table(box=None, pad_edge=False)
    for title in described[0]:
        table.add_column(title.replace("_", " "), overflow="fold")
    for row in described:
        table.add_row(*row.values())
    console.print(table)


def _login_state(vault: str) -> str:
    try:
        login_of(vault, os.environ)
    except InvalidInput:
        return f"missing: set {variable_prefix(vault)}_USER and _PASSWORD"
    return "set"
