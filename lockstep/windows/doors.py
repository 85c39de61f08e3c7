"""What the window commands open: settings with the stack adopted, the warehouse, and sources of registered vaults.

What belongs here: finding and opening. What does not: words for the terminal, and building clients (resources/, which
is imported inside functions because `lockstep` stands without it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import connect
from lockstep.kernel.settings import Settings, load_settings
from lockstep.vaults.registry import RegisteredVault, VaultRegistry
from lockstep.windows.raw import RawStore

if TYPE_CHECKING:
    from lockstep.windows.producer import Producer
    from resources.windows import WindowsResource


def adopted_settings() -> Settings:
    """The settings, with the addresses of the stack of this home where it is up."""
    from stack.environment import adopt  # keeps `import lockstep` free of the stack

    adopt(load_settings())
    return load_settings()


def warehouse(settings: Settings) -> WindowsResource:
    """The warehouse of these settings."""
    from resources.assembly import build_windows  # clients are built there and nowhere else

    if settings.warehouse_dsn is None or settings.postgres_dsn is None:
        raise InvalidInput("no warehouse is known.", next_step="start the stack with `lockstep up`.")
    return build_windows(settings, settings.warehouse_dsn.get_secret_value(), settings.postgres_dsn.get_secret_value())


def registered(settings: Settings, only: str | None = None) -> list[RegisteredVault]:
    """The registered vaults, or the one that is asked for; `InvalidInput` if there is none."""
    if settings.postgres_dsn is None:
        raise InvalidInput("no database is known.", next_step="start the stack with `lockstep up`.")
    with connect(settings.postgres_dsn, application_name="lockstep-produce") as connection:
        vaults = VaultRegistry(connection).vaults()
    found = [vault for vault in vaults if only in (None, vault.id)]
    if not found:
        who = f"vault {only} is not registered" if only else "no vault is registered"
        raise InvalidInput(f"{who}.", next_step="add it with `lockstep vaults add --id … --url …`.")
    return found


@contextmanager
def open_source(settings: Settings, vault: str) -> Iterator[Producer]:
    """A producer of one registered vault."""
    from resources.clients import aws_client  # clients are built there and nowhere else
    from resources.producers import open_producer

    (found,) = registered(settings, vault)
    s3, dynamodb = (aws_client(name, region=settings.aws_region) for name in ("s3", "dynamodb"))
    raw, folder = RawStore(s3, settings.windows_bucket), settings.home / "work" / "windows"
    with open_producer(found, raw=raw, dynamodb=dynamodb, folder=folder) as producer:
        yield producer
