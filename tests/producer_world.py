"""What tests of the producer share: a fresh bucket and queue table, a producer on them, and a look at what is there."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import httpx
from pydantic import SecretStr

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.retry import RetryPolicy
from lockstep.vaults.registry import Login
from lockstep.windows.archive import Limits
from lockstep.windows.client import VaultClient
from lockstep.windows.model import MANIFEST_NAME, RawManifest
from lockstep.windows.producer import Producer
from lockstep.windows.queue import WindowQueue
from lockstep.windows.raw import RawStore

LIMITS = Limits(members=1000, total_bytes=256 * 1024**2, small=4 * 1024**2)
QUICK = RetryPolicy(max_attempts=2, base_seconds=0, budget_seconds=5)


class Place:
    """A bucket and a queue table that only one test uses."""

    def __init__(self, bucket: str | None = None, table: str | None = None) -> None:
        self.s3, self.dynamodb = boto3.client("s3"), boto3.client("dynamodb")
        self.bucket = bucket or f"test-{secrets.token_hex(6)}"
        self.table = table or f"test_{secrets.token_hex(6)}"
        self.raw, self.queue = RawStore(self.s3, self.bucket), WindowQueue(self.dynamodb, self.table)

    def create(self) -> Place:
        self.s3.create_bucket(Bucket=self.bucket)
        keys = ("vault_id", "stoptime")
        self.dynamodb.create_table(
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in keys],
            KeySchema=[{"AttributeName": k, "KeyType": t} for k, t in zip(keys, ("HASH", "RANGE"), strict=True)],
        )
        return self

    def objects(self) -> dict[str, bytes]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return {key: self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read() for key in keys}

    def items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.dynamodb.scan(TableName=self.table, ConsistentRead=True)["Items"]
        return sorted(found, key=lambda item: (item["vault_id"]["S"], item["stoptime"]["S"]))

    def stops(self, vault: str) -> list[str]:
        return [row.window.stoptime for row in self.queue.rows(vault)]

    def check(self) -> int:
        """Every row points at a whole window: manifest by checksum, files by sha256. Returns how many rows."""
        objects, rows = self.objects(), [item for item in self.items() if "checksum" in item]
        for item in rows:
            text = objects[item["s3_prefix"]["S"] + MANIFEST_NAME]
            assert hashlib.sha256(text).hexdigest() == item["checksum"]["S"]
            manifest = RawManifest.from_json(text)
            for file in (*manifest.files, *([manifest.schema] if manifest.schema else [])):
                assert hashlib.sha256(objects[file.key]).hexdigest() == file.sha256
                assert len(objects[file.key]) == file.bytes
        return len(rows)


@contextmanager
def producing(place: Place, vault: str, url: str, folder: Path, **options: Any) -> Iterator[Producer]:
    """A producer that waits for nothing and always sees the same time."""
    with httpx.Client() as http:
        client = VaultClient(vault, url, Login("u", SecretStr("p")), http, retry=options.pop("retry", QUICK))
        clock = options.pop("clock", FakeClock(datetime(2026, 6, 1, tzinfo=UTC)))
        yield Producer(client, place.raw, place.queue, folder=folder, clock=clock, limits=LIMITS, **options)
