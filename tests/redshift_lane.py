"""A lane on the Redshift sink, run on PostgreSQL: production code throughout, with COPY alone replaced.

The replacement reads the same manifest from the same bucket and refuses what Redshift would refuse.
"""

from __future__ import annotations

import io
import json
import os
import re
from functools import partial
from typing import Any

from lockstep.warehouse.redshift import NULL_MARK
from lockstep.warehouse.session import Session
from lockstep.windows.places import Place
from lockstep.windows.sink import Sink
from resources import redshift
from resources.redshift import RedshiftWindowsResource
from tests.windows_lane import LaneUnderTest, open_s3

_COPY = re.compile(
    r"COPY (?P<table>\S+) \((?P<columns>[^)]*)\) FROM 's3://(?P<bucket>[^/]+)/(?P<key>[^']+)' IAM_ROLE default "
    r"REGION '[^']+' FORMAT AS CSV MANIFEST NULL AS"
)


class ManifestSession(Session):
    """A session whose COPY is a loader of the same manifest."""

    def copy(self, statement: str) -> None:
        match = _COPY.match(statement)
        assert match is not None, statement
        s3, body = open_s3()(), io.BytesIO()
        for entry in json.loads(_read(s3, match["bucket"], match["key"]))["entries"]:
            assert entry["mandatory"] is True
            bucket, _, key = entry["url"].removeprefix("s3://").partition("/")
            body.write(_read(s3, bucket, key))
        body.seek(0)
        loading = f"COPY {match['table']} ({match['columns']}) FROM STDIN (FORMAT csv, NULL '{NULL_MARK}')"
        try:
            with self._connection.cursor() as cursor:
                cursor.copy_expert(loading, body)
        except Exception as error:
            raise self._translated(error) from error


def _read(s3: Any, bucket: str, key: str) -> bytes:
    body: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    return body


def open_manifest_session(dsn: str) -> Session:
    return ManifestSession(redshift.open_connection(dsn))


class WarehouseOnPostgres(RedshiftWindowsResource):
    """The production resource with that one replacement."""

    def session_factory(self) -> partial[Session]:
        return partial(open_manifest_session, self.dsn)


class RedshiftLane(LaneUnderTest):
    """A lane whose sink and place come from the Redshift resource."""

    @property
    def resource(self) -> WarehouseOnPostgres:
        return WarehouseOnPostgres(
            dsn=f"{self.dsn}?sslmode=disable",
            bucket=self.world.bucket,
            state_dsn=os.environ["LOCKSTEP_POSTGRES_DSN"],
        )

    def new_store(self) -> Sink:
        return self.resource.open_store()

    def place(self) -> Place:
        return self.resource.place()
