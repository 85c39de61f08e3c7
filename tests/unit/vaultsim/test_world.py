"""The simulated data: the same for the same seed, consistent over time, a true oracle for what a loader must hold."""

from __future__ import annotations

import csv
import io
import tarfile
from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.vaultsim.model import Change, ChangeKind, Twist, VaultConfig
from lockstep.vaultsim.packing import csv_field
from lockstep.vaultsim.rows import World
from lockstep.vaultsim.site import VaultSite

CONFIG = VaultConfig(id="v1", rows=12, base_rows=10, delete_percent=30, empty_every=5)


def test_a_window_is_the_same_in_two_worlds_and_does_not_depend_on_what_was_asked_before():
    """Guards archives that are made again for a second download: one other byte is another checksum."""
    one, other = World(CONFIG), World(CONFIG)
    for index in range(20):
        for thing in one.things(index):
            one.window(thing, index)
    study = one.things(17)[0]
    assert one.window(study, 17) == other.window(study, 17)
    assert World(CONFIG.model_copy(update={"seed": 2})).window(study, 17) != one.window(study, 17)


def test_only_rows_that_exist_are_deleted_and_no_row_is_changed_after_its_death():
    """Guards the oracle: a loader that applied windows in order must never see a ghost."""
    world = World(CONFIG)
    for name in ("study__v", "picklist__sys", "document_version__sys"):
        alive: set[object] = set()
        deaths = 0
        for index in range(-1, 40):
            thing = next(one for one in world.things(index) if one.name == name)
            change = world.window(thing, index)
            assert set(change.deletes) <= alive
            alive -= set(change.deletes)
            deaths += len(change.deletes)
            places = [[column.name for column in thing.columns].index(part) for part in thing.key]
            keys = [tuple(row[place] for place in places) for row in change.upserts]
            assert len(keys) == len(set(keys))
            alive |= set(keys)
        assert deaths
        assert alive == set(world.state_after(39)[name])


def test_an_empty_window_changes_nothing_at_all():
    world = World(CONFIG)
    changes = [world.window(thing, 4) for thing in world.things(4)]
    assert not any(change.upserts or change.deletes for change in changes)


@pytest.mark.parametrize("twist", list(Twist))
def test_a_twist_repeats_an_id_on_purpose(twist: Twist):
    world = World(CONFIG, twists={2: twist})
    study = world.things(2)[0]
    change = world.window(study, 2)
    ids = [row[0] for row in change.upserts]
    if twist is Twist.BOTH_FILES:
        assert set(change.deletes) & {(one,) for one in ids}
    else:
        assert len(ids) == len(set(ids)) + 1


def test_a_change_of_the_schema_is_in_force_from_its_window_on_and_shifts_the_columns():
    """Guards loaders that read by position."""
    change = Change(kind=ChangeKind.COLUMN, object="study__v", column="aaa_new__c", index=3)
    world = World(CONFIG, (change,))
    before, after = ([column.name for column in world.things(index)[0].columns] for index in (2, 3))
    assert "aaa_new__c" not in before
    assert after.index("aaa_new__c") < after.index("amount__c")
    rows = world.state_after(8)["study__v"].values()
    assert any(row[after.index("aaa_new__c")] is None for row in rows)
    assert any(row[after.index("aaa_new__c")] for row in rows)


def test_a_new_object_and_a_widened_text_appear_in_their_window_only():
    changes = (
        Change(kind=ChangeKind.OBJECT, object="trial__c", index=2),
        Change(kind=ChangeKind.WIDEN, object="study__v", column="name__v", length=400, index=3),
        Change(kind=ChangeKind.DROP_COLUMN, object="site__v", column="amount__c", index=4),
    )
    world = World(CONFIG, changes)
    assert "trial__c" not in {one.name for one in world.things(1)}
    trial = next(one for one in world.things(2) if one.name == "trial__c")
    assert world.window(trial, 2).upserts
    name = next(column for column in world.things(3)[0].columns if column.name == "name__v")
    assert name.length == 400
    assert max(len(row[2] or "") for row in world.window(world.things(3)[0], 3).upserts) == 400
    site = next(one for one in world.things(4 + 4) if one.name == "site__v")
    assert "amount__c" not in {column.name for column in site.columns}


@pytest.mark.parametrize("value", ["plain", 'a "b"', "x,y", "two\nlines", " edge", "caf\u00e9"])
def test_a_csv_field_reads_back_as_it_was(value: str):
    assert next(csv.reader(io.StringIO(csv_field(value), newline=""))) == [value]


def test_null_is_nothing_and_an_empty_text_is_two_quotes():
    assert (csv_field(None), csv_field("")) == ("", '""')


def test_everything_survives_a_restart(tmp_path: Path):
    """Guards scenarios that kill the simulator: a vault that forgets a withheld window publishes it by accident."""
    site = VaultSite(tmp_path)
    site.add({"id": "v1", "rows": 3})
    site.control("v1", "publish", {"windows": 3})
    site.control("v1", "withhold", {"stop": "202601010030"})
    site.control("v1", "knobs", {"part_size": 500})
    site.control("v1", "evolve", {"kind": "column", "object": "study__v", "column": "extra__c"})
    before, listed = site.state("v1"), site.listing(site.state("v1"), None, None, None)
    again = VaultSite(tmp_path)  # the first one was not closed: as after kill -9
    assert again.state("v1") == before
    assert again.listing(again.state("v1"), None, None, None) == listed


def test_a_full_archive_is_what_the_windows_before_it_add_up_to(tmp_path: Path):
    site = VaultSite(tmp_path)
    site.add(CONFIG.model_dump(mode="json"))
    site.control("v1", "publish", {"windows": 9})
    state = site.control("v1", "full", {})
    newest = site.listing(state, "full_directdata", None, None)[-1]
    assert newest["start_time"] == "2000-01-01T00:00Z"
    content = site.part(state, newest["filepart_details"][0]["name"])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        text = tar.extractfile("Object/study__v.csv").read().decode()  # type: ignore[union-attr]
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert {(row["id"],) for row in rows} == set(World(CONFIG).state_after(8)["study__v"])


@pytest.mark.parametrize(
    ("action", "data"),
    [
        ("publish", {"windows": 0}),
        ("withhold", {"stop": "202601010007"}),
        ("withhold", {}),
        ("poison", {"stop": "202601010015", "kind": "plague"}),
        ("knobs", {"part_size": 0}),
        ("knobs", {"no_such_knob": 1}),
        ("evolve", {"kind": "column", "object": "nothing__v", "column": "x__c"}),
        ("evolve", {"kind": "widen", "object": "study__v", "column": "nothing__c"}),
    ],
)
def test_a_control_that_makes_no_sense_changes_nothing(tmp_path: Path, action: str, data: dict[str, object]):
    site = VaultSite(tmp_path)
    site.add({"id": "v1", "rows": 3})
    before = site.state("v1")
    with pytest.raises(InvalidInput):
        site.control("v1", action, data)
    assert VaultSite(tmp_path).state("v1") == before == site.state("v1")
