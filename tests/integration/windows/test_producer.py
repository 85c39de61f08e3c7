"""The producer on real S3 and DynamoDB: whole or not at all, in order, once, and never a silent hole."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import connect
from lockstep.vaults.registry import VaultRegistry
from lockstep.windows.model import FileType, RawManifest, WindowKind, WindowStatus, parse_stoptime
from lockstep.windows.producer import Producer, ProducerReport
from tests.producer_world import Place, producing
from tests.simulator import Simulator, running_simulator

pytestmark = pytest.mark.stack

_ids = count(1)


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("vault")) as running:
        yield running


@pytest.fixture
def place(stack: Any) -> Place:
    return Place().create()


class Source:
    """One simulated vault and its producer."""

    def __init__(self, simulator: Simulator, vault: str, producer: Producer) -> None:
        self.simulator, self.vault, self.producer = simulator, vault, producer

    def do(self, action: str, **data: Any) -> None:
        self.simulator.do(self.vault, action, **data)

    def run(self, **options: Any) -> ProducerReport:
        return self.producer.run(**options)


@pytest.fixture
def source(simulator: Simulator, place: Place, tmp_path: Path) -> Iterator[Source]:
    vault = f"70{next(_ids):04d}{secrets.token_hex(2)}"
    simulator.add(
        vault, rows=6, base_rows=5, objects=["study__v", "document_version__sys", "picklist__sys"], empty_every=4
    )
    with producing(place, vault, simulator.address(vault), tmp_path / "work") as producer:
        yield Source(simulator, vault, producer)


def test_everything_listed_is_kept_whole_and_queued_in_order(source: Source, place: Place):
    source.do("publish", windows=5)
    report = source.run()
    assert report.healthy
    assert place.stops(source.vault) == [f"2026010100{m}" for m in (15, 30, 45)] + ["202601010100", "202601010115"]
    assert place.check() == 6  # five windows and the first full archive
    row = next(place.queue.rows(source.vault))
    assert (row.status, row.attempt_count, row.fence) == (WindowStatus.READY, 0, 0)
    assert row.s3_prefix == f"vault={source.vault}/stoptime=202601010015/"
    manifest = place.raw.read_manifest(row.window)
    assert manifest is not None
    keys = {key.removeprefix(row.s3_prefix) for key in place.objects() if key.startswith(row.s3_prefix)}
    assert {"manifest.csv", "metadata.csv", "study__v_upsert.csv", "lockstep-manifest.json"} <= keys
    assert manifest.schema is not None
    assert {one.type for one in manifest.files} <= {FileType.UPSERT, FileType.DELETE}


def test_an_empty_window_is_a_link_of_the_chain_like_any_other(source: Source, place: Place):
    """Guards the watermark, which could never step over a window that has no row."""
    source.do("publish", windows=4)
    source.run()
    empty = list(place.queue.rows(source.vault))[3]
    manifest = place.raw.read_manifest(empty.window)
    assert manifest is not None
    assert (manifest.record_count, manifest.files) == (0, ())


def test_a_second_pass_changes_nothing(source: Source, place: Place):
    source.do("publish", windows=3)
    source.run()
    before = (place.objects(), place.items())
    assert source.run().produced == []
    assert (place.objects(), place.items()) == before


def test_order_duplicates_small_parts_and_missing_checksums_change_nothing_but_the_parts(
    source: Source, place: Place, simulator: Simulator, tmp_path: Path
):
    source.do("publish", windows=6)
    source.run()
    source.do("knobs", shuffle=True, duplicates=True, part_size=500, md5=False)
    other = Place().create()
    with producing(other, source.vault, simulator.address(source.vault), tmp_path / "other") as producer:
        assert producer.run().healthy

    def csvs(where: Place) -> dict[str, bytes]:
        return {key: body for key, body in where.objects().items() if key.endswith(".csv")}

    assert csvs(other) == csvs(place)
    assert other.stops(source.vault) == place.stops(source.vault)
    manifest = other.raw.read_manifest(next(other.queue.rows(source.vault)).window)
    assert manifest is not None
    assert len(manifest.source_parts) > 2


def test_a_late_window_is_a_recorded_gap_until_it_comes(source: Source, place: Place):
    """Guards the case of the vendor's own example: 13:45 fails while 14:00 is already there."""
    source.do("publish", windows=4)
    source.do("withhold", stop="202601010030", message="busy")
    report = source.run()
    assert place.stops(source.vault) == ["202601010015", "202601010045", "202601010100"]
    assert report.contiguous_until == parse_stoptime("202601010015")
    gap = place.queue.gaps(source.vault)[0]
    assert (gap.start, gap.stop) == (parse_stoptime("202601010015"), parse_stoptime("202601010030"))
    assert "busy" in gap.reason
    assert gap.next_retry is not None
    source.run()
    assert place.queue.gaps(source.vault)[0].attempt_count == 2
    source.do("release", stop="202601010030")
    assert source.run().healthy
    assert place.queue.gaps(source.vault) == []
    assert len(place.stops(source.vault)) == 4


def test_a_window_that_vanishes_without_a_word_is_a_gap(source: Source, place: Place):
    source.do("publish", windows=4)
    source.do("lose", stop="202601010030")
    report = source.run()
    assert [(gap.start, gap.stop) for gap in report.gaps] == [
        (parse_stoptime("202601010015"), parse_stoptime("202601010030"))
    ]
    assert [gap.reason for gap in place.queue.gaps(source.vault)] == ["the vendor does not list this stretch"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("traversal", "outside.csv"),
        ("bomb", "Object/bomb.csv"),
        ("truncated", "truncated"),
        ("wrong_md5", "MD5"),
        ("missing_part", "2 parts are announced"),
        ("missing_file", "Object/study__v.csv"),
        ("lying_manifest", "Object/study__v.csv"),
        ("binary_csv", "Object/study__v.csv"),
        ("wide", "5001 columns"),
        ("json_body", "UNEXPECTED_ERROR"),
    ],
)
def test_an_archive_that_cannot_be_trusted_reaches_neither_queue_nor_bucket(
    source: Source, place: Place, tmp_path: Path, fault: str, words: str
):
    """Guards the warehouse, and the windows behind: the others go on, and the bad one is tried again."""
    source.do("publish", windows=3)
    source.do("fault", stop="202601010030", kind=fault)
    report = source.run()
    assert place.stops(source.vault) == ["202601010015", "202601010045"]
    assert not [key for key in place.objects() if "stoptime=202601010030" in key]
    gap = place.queue.gaps(source.vault)[0]
    assert words in gap.reason
    assert "202601010030" in gap.reason or "20260101-0030" in gap.reason
    assert [one.stop for one in report.gaps] == [gap.stop]
    assert not list((tmp_path / "work").iterdir())
    source.do("heal", stop="202601010030")
    assert source.run().healthy
    assert place.queue.gaps(source.vault) == []
    assert place.check() == 4


def _clock(hour: int) -> FakeClock:
    """A time of its own, so that no two producers write the same manifest."""
    return FakeClock(datetime(2026, 6, 1, hour, tzinfo=UTC))


def test_producers_at_the_same_time_make_one_of_everything(
    source: Source, place: Place, simulator: Simulator, tmp_path: Path
):
    """Guards the checksum: the row must name the manifest that won, whoever wrote the row."""
    source.do("publish", windows=6)
    with ExitStack() as opened, ThreadPoolExecutor(4) as pool:
        producers = [
            opened.enter_context(
                producing(place, source.vault, simulator.address(source.vault), tmp_path / str(n), clock=_clock(n))
            )
            for n in range(4)
        ]
        reports = list(pool.map(lambda one: one.run(), producers))
    assert all(report.healthy for report in reports)
    made = [window.sort_key for report in reports for window in report.produced]
    assert len(made) == len(set(made)) == 7
    assert place.check() == 7


def test_a_row_is_never_set_back_whatever_the_vendor_lists(source: Source, place: Place):
    source.do("publish", windows=2)
    source.run()
    row = next(place.queue.rows(source.vault))
    place.dynamodb.update_item(
        TableName=place.table,
        Key={"vault_id": {"S": source.vault}, "stoptime": {"S": row.window.stoptime}},
        UpdateExpression="SET #s = :s",
        ExpressionAttributeNames={"#s": "status"},
        ExpressionAttributeValues={":s": {"S": "APPLIED"}},
    )
    assert not place.queue.add_ready(row.window, "other")
    source.run(watermark=parse_stoptime("202601010000"))
    again = place.queue.get(row.window)
    assert again is not None
    assert (again.status, again.checksum) == (WindowStatus.APPLIED, row.checksum)


def _mark_failed(place: Place, source: Source, stop: str) -> None:
    place.dynamodb.update_item(
        TableName=place.table,
        Key={"vault_id": {"S": source.vault}, "stoptime": {"S": stop}},
        UpdateExpression="SET #s = :s",
        ExpressionAttributeNames={"#s": "status"},
        ExpressionAttributeValues={":s": {"S": "FAILED"}},
    )


def test_a_failed_window_that_the_vendor_publishes_anew_is_fetched_anew_and_stays_failed(source: Source, place: Place):
    """Guards the repair of a poisoned window: a retry must see the new data, and only a person retries."""
    source.do("publish", windows=3)
    source.do("poison", stop="202601010030")
    source.run()
    _mark_failed(place, source, "202601010030")
    old = list(place.queue.rows(source.vault))[1]
    assert source.run().replaced == []
    source.do("heal", stop="202601010030")
    assert source.run().replaced == [old.window]
    new = place.queue.get(old.window)
    assert new is not None
    assert new.status is WindowStatus.FAILED
    assert new.checksum != old.checksum
    assert b"twelve" not in place.objects()[old.s3_prefix + "study__v_upsert.csv"]
    assert place.check() == 4
    assert not source.producer.refetch(new)


def test_a_failed_window_is_compared_by_content_when_the_vendor_sends_no_checksum(source: Source, place: Place):
    source.do("knobs", md5=False)
    source.do("publish", windows=1)
    source.run()
    _mark_failed(place, source, "202601010015")
    row = next(place.queue.rows(source.vault))
    assert not source.producer.refetch(row)
    source.do("poison", stop="202601010015")
    assert source.producer.refetch(row)
    assert place.check() == 2


def test_the_first_full_archive_and_every_log_come_by_themselves_and_later_ones_on_demand(source: Source, place: Place):
    source.do("publish", windows=3)
    source.do("log")
    source.run()
    assert [row.window.stoptime for row in place.queue.rows(source.vault, kind=WindowKind.FULL)] == ["202601010000"]
    assert [row.window.stoptime for row in place.queue.rows(source.vault, kind=WindowKind.LOG)] == ["202601010045"]
    source.do("full")
    assert source.run().produced == []
    window = source.producer.produce_full()
    assert window == source.producer.produce_full()
    assert (window.stoptime, window.prefix) == ("202601010045", f"vault={source.vault}/full=202601010045/")
    assert place.check() == 6
    manifest = place.raw.read_manifest(window)
    assert manifest is not None
    assert manifest.schema is not None
    with pytest.raises(InvalidInput, match="no full archive"):
        source.producer.produce_full(stop=datetime(2025, 1, 1, tzinfo=UTC))


def test_a_spent_burst_limit_ends_the_pass_and_the_next_one_goes_on(
    source: Source, place: Place, simulator: Simulator, tmp_path: Path
):
    """Guards against counting windows as missing that nobody asked for yet."""
    source.do("publish", windows=12)
    source.do("knobs", burst_limit=6, burst_seconds=1000)
    report = source.run()
    assert report.halted
    assert report.gaps == []
    got = len(place.stops(source.vault))
    assert got < 12
    assert place.stops(source.vault) == sorted(place.stops(source.vault))
    source.do("knobs", burst_limit=100000)
    with producing(place, source.vault, simulator.address(source.vault), tmp_path / "next") as producer:
        assert producer.run().healthy
    assert len(place.stops(source.vault)) == 12


def test_the_watermark_is_where_the_chain_must_start(source: Source, place: Place):
    source.do("publish", windows=6)
    source.do("withhold", stop="202601010030")
    report = source.run(watermark=parse_stoptime("202601010015"))
    assert "202601010015" not in place.stops(source.vault)
    assert [gap.stop for gap in report.gaps] == [parse_stoptime("202601010030")]
    source.run(watermark=parse_stoptime("202601010030"))
    assert place.queue.gaps(source.vault) == []


def test_a_damaged_manifest_of_ours_is_written_anew(source: Source, place: Place):
    source.do("publish", windows=1)
    source.run()
    row = next(place.queue.rows(source.vault))
    place.dynamodb.delete_item(
        TableName=place.table, Key={"vault_id": {"S": source.vault}, "stoptime": {"S": row.window.stoptime}}
    )
    place.s3.put_object(Bucket=place.bucket, Key=row.window.manifest_key, Body=b"{}")
    assert source.run().healthy
    assert place.check() == 2


def test_a_window_whose_files_were_lost_is_fetched_again_before_it_is_queued(source: Source, place: Place):
    """Guards the rebuilt queue: a manifest alone does not make a window whole."""
    source.do("publish", windows=1)
    source.run()
    row = next(place.queue.rows(source.vault))
    place.dynamodb.delete_item(
        TableName=place.table, Key={"vault_id": {"S": source.vault}, "stoptime": {"S": row.window.stoptime}}
    )
    place.s3.delete_object(Bucket=place.bucket, Key=row.s3_prefix + "study__v_upsert.csv")
    assert source.run().healthy
    assert place.check() == 2


def test_one_vaults_failure_touches_no_other_and_the_command_says_which(
    stack: Any, simulator: Simulator, source: Source, tmp_path: Path
):
    """Guards the night shift: one locked user must not stop ten vaults."""
    good, bad = source.vault, f"{source.vault}1"
    simulator.add(bad, rows=1)
    source.do("publish", windows=2)
    simulator.do(bad, "knobs", locked_out=True)
    place = Place().create()
    environment = {**os.environ, "LOCKSTEP_HOME": str(tmp_path), "LOCKSTEP_WINDOWS_BUCKET": place.bucket}
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    with connect(os.environ["LOCKSTEP_POSTGRES_DSN"], application_name="test") as connection:
        registry = VaultRegistry(connection)
        others = registry.vaults()
        for vault in others:
            registry.remove(vault.id)
        registry.add(good, simulator.address(good), actor="test")
        registry.add(bad, simulator.address(bad), actor="test")
        try:
            done = subprocess.run(
                [lockstep, "windows", "produce", "--json"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            registry.remove(good)
            registry.remove(bad)
            for vault in others:
                registry.add(vault.id, vault.url, actor=vault.added_by)
    assert done.returncode == 1, done.stderr
    reports = {report["vault"]: report for report in json.loads(done.stdout)}
    assert reports[good]["healthy"]
    assert len(reports[good]["produced"]) == 3
    assert "USER_LOCKED_OUT" in reports[bad]["problems"][0]
    text = RawManifest.from_json(place.objects()[f"vault={good}/stoptime=202601010015/lockstep-manifest.json"])
    assert text.window.vault == good
