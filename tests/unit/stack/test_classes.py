"""Class archives: used when they are there, never needed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from stack import classes


@pytest.mark.parametrize("part", classes.PARTS)
def test_a_list_is_shipped_for_every_part_and_names_its_own_classes(part: str):
    text = gzip.decompress((classes.LISTS / f"{part}.lst.gz").read_bytes()).decode()
    own = {"sqs": "org/elasticmq/", "s3": "org/gaul/s3proxy/", "spark": "org/apache/spark/sql/delta/"}[part]
    assert own in text


def test_an_archive_is_used_when_it_is_there_and_left_out_when_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(classes, "ARCHIVES", tmp_path)
    assert not any("SharedArchiveFile" in flag for flag in classes.flags("s3"))
    (tmp_path / "s3.jsa").touch()
    assert f"-XX:SharedArchiveFile={tmp_path / 's3.jsa'}" in classes.flags("s3")


def test_the_class_path_of_spark_holds_delta_and_every_entry_exists():
    entries = classes.class_path("spark").split(os.pathsep)
    assert any("delta-spark" in entry for entry in entries)
    assert all(Path(entry).is_file() for entry in entries)
