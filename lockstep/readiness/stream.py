"""Markers from the table's stream: what was asked since the cursor. A hint only: the sweep finds what is missed here.

What belongs here: reading shards within bounds. What does not: what a marker leads to (worker.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from boto3.dynamodb.types import TypeDeserializer
from botocore.exceptions import ClientError

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import get_logger
from lockstep.readiness.store import Marker, read_marker

PREFIX = "MARKER#"
MAX_PAGES_PER_SHARD = 5
_MOST_SHARDS = 100

_log = get_logger(__name__)
_load = TypeDeserializer().deserialize


class Read(NamedTuple):
    """New markers, and where to go on."""

    markers: list[Marker]
    cursor: str


def read(client: Any, stream_arn: str, cursor: str | None, go_on: Callable[[], bool] = lambda: True) -> Read:
    """Read every shard once, from where the cursor left it; without a usable cursor, from the oldest record.

    `go_on` is asked before every call: what is not read when it says no is read next time.
    """
    places, markers = _places(cursor), []
    shards = _shards(client, stream_arn)
    for shard in shards:
        for record in _records(client, stream_arn, shard, places, go_on):
            marker = marker_of(record)
            if marker is not None:
                markers.append(marker)
    kept = {shard: places[shard] for shard in shards if shard in places}
    return Read(markers, json.dumps(kept))


def marker_of(record: Mapping[str, Any]) -> Marker | None:
    """The marker in a stream record; None for everything else that the table's stream carries."""
    change = record.get("dynamodb", {})
    if record.get("eventName") not in ("INSERT", "MODIFY") or "NewImage" not in change:
        return None
    if not change["NewImage"].get("PK", {}).get("S", "").startswith(PREFIX):
        return None
    try:
        return read_marker({name: _load(value) for name, value in change["NewImage"].items()})
    except (InvalidInput, KeyError) as error:  # the sweep finds it too, and answers in the event log
        _log.warning("marker cannot be read", marker=str(change.get("Keys")), error=str(error))
        return None


def _places(cursor: str | None) -> dict[str, str]:
    try:
        places = json.loads(cursor or "{}")
    except ValueError:
        return {}
    return {str(shard): str(place) for shard, place in places.items()} if isinstance(places, dict) else {}


def _shards(client: Any, stream_arn: str) -> list[str]:
    description = client.describe_stream(StreamArn=stream_arn, Limit=_MOST_SHARDS)["StreamDescription"]
    return [shard["ShardId"] for shard in description["Shards"]]


def _records(
    client: Any, arn: str, shard: str, places: dict[str, str], go_on: Callable[[], bool]
) -> Iterator[Mapping[str, Any]]:
    iterator = _iterator(client, arn, shard, places.get(shard)) if go_on() else None
    for _ in range(MAX_PAGES_PER_SHARD):
        if iterator is None or not go_on():
            return
        page = client.get_records(ShardIterator=iterator, Limit=1000)
        for record in page["Records"]:
            places[shard] = record["dynamodb"]["SequenceNumber"]
            yield record
        if not page["Records"]:
            return
        iterator = page.get("NextShardIterator")


def _iterator(client: Any, arn: str, shard: str, after: str | None) -> str | None:
    start: dict[str, str] = {"ShardIteratorType": "TRIM_HORIZON"}
    if after is not None:
        start = {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": after}
    try:
        return str(client.get_shard_iterator(StreamArn=arn, ShardId=shard, **start)["ShardIterator"])
    except ClientError as error:
        if after is None:
            raise
        # Records older than a day are gone, and a table made anew knows nothing of our place.
        _log.warning("stream read from its oldest record", shard=shard, error=str(error))
        return _iterator(client, arn, shard, None)
