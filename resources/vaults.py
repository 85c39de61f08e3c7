"""Vaults as a Dagster resource: a producer for an asset, and the address of a vault from the registry.

What belongs here: opening what a producer needs inside a run. What does not: how it is put together (producers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from lockstep.kernel.errors import InvalidInput
from lockstep.vaults.registry import RegisteredVault, VaultRegistry
from lockstep.windows.producer import Producer
from lockstep.windows.raw import RawStore
from resources.clients import aws_client
from resources.databases import PostgresResource
from resources.producers import open_producer


class VaultSourceResource(dg.ConfigurableResource):
    """Producers of registered vaults. Logins are read from the environment when a run needs them."""

    region_name: str
    bucket: str = Field(description="Bucket of the raw windows.")
    work_folder: str = Field(description="Where archives are unpacked; local disk, emptied after each window.")

    @contextmanager
    def producer(self, vault: str, postgres: PostgresResource) -> Iterator[Producer]:
        """A producer of `vault`, usable inside the block."""
        registered = self._registered(vault, postgres)
        raw, folder = RawStore(self._client("s3"), self.bucket), Path(self.work_folder)
        with open_producer(registered, raw=raw, dynamodb=self._client("dynamodb"), folder=folder) as producer:
            yield producer

    def _registered(self, vault: str, postgres: PostgresResource) -> RegisteredVault:
        with postgres.connect() as connection:
            for one in VaultRegistry(connection).vaults():
                if one.id == vault:
                    return one
        raise InvalidInput(
            "it is not registered.",
            unit=f"vault {vault}",
            next_step="add it with `lockstep vaults add --id … --url …`.",
        )

    def _client(self, service: str) -> Any:
        return aws_client(service, region=self.region_name)
