"""Class archives: the Java parts start from memory images of their classes, in a third of the time and half the work.

What belongs here: the class path of each Java part, its archive (made by `make setup` on this machine, kept in
`.venv`), and the lists of classes that the archives are made from (recorded for the locked jars, in `class_lists/`).
What does not: how a part is started. Without an archive that fits, Java starts as ever, only slower.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stack import jars, java

# Not DynamoDB Local: the manifest of its jar names its folder as a class path, which Java refuses to archive.
PARTS = ("sqs", "s3", "spark")
LISTS = Path(__file__).with_name("class_lists")
ARCHIVES = Path(sys.prefix) / "share" / "lockstep"
RECORD = "STACK_RECORD_CLASSES"
_DUMP_SECONDS = 300

# An archive holds objects in the layout of one collector. Serial: the small parts have small heaps and few cores.
COLLECTOR = {"spark": "-XX:+UseG1GC"}
_SMALL = "-XX:+UseSerialGC"


def class_path(part: str) -> str:
    """Where Java finds the classes of a part."""
    return os.pathsep.join(_entries(part))


def flags(part: str) -> list[str]:
    """How `java` is told of the classes of a part: class path, collector, and the archive if there is one."""
    archive, told = ARCHIVES / f"{part}.jsa", [COLLECTOR.get(part, _SMALL)]
    if folder := os.environ.get(RECORD):
        told.append(f"-XX:DumpLoadedClassList={Path(folder) / part}.lst")
    elif archive.is_file():
        told.append(f"-XX:SharedArchiveFile={archive}")
    return [*told, "-cp", class_path(part)]


def build() -> int:
    """Make the archive of every part that has a list; return how many could be made."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    return sum(_build(part) for part in PARTS if (LISTS / f"{part}.lst.gz").is_file())


def record() -> None:
    """Note which classes each part loads when it starts and a Delta table is written and merged; for `lock-jars`."""
    from lockstep.kernel.settings import load_settings
    from stack.lifecycle import Stack

    LISTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RECORD] = folder
        stack = Stack(load_settings(home=Path(folder) / "home"))
        try:
            stack.up([*PARTS, "postgres"])
            _exercise(stack.site().environment["LOCKSTEP_SPARK_REMOTE"])
        finally:
            stack.down()
        for part in PARTS:
            text = (Path(folder) / f"{part}.lst").read_bytes()
            (LISTS / f"{part}.lst.gz").write_bytes(gzip.compress(text, mtime=0))


def _exercise(remote: str) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(remote).create()
    table = "s3a://lockstep-lake/classes"
    for _ in range(2):
        spark.range(10).selectExpr("id", "id % 2 AS day").write.format("delta").mode("overwrite").save(table)
    merge = f"MERGE INTO delta.`{table}` t USING {{rows}} s ON t.id = s.id WHEN MATCHED THEN UPDATE SET *"
    spark.sql(merge, rows=spark.range(5).selectExpr("id", "7L AS day")).collect()
    spark.read.format("delta").load(table).groupBy("day").count().orderBy("day").collect()
    spark.stop()


def _entries(part: str) -> list[str]:
    if part == "spark":
        return [str(path) for path in [*_spark_jars("*.jar"), *jars.spark_classpath()]]
    # Janino compiles the few lines of Java that bind DynamoDB Local to loopback.
    compiler = [*_spark_jars("*janino*.jar"), *_spark_jars("commons-compiler*.jar")] if part == "dynamodb" else []
    return [str(path) for path in [*jars.classpath(part), *compiler]]


def _spark_jars(pattern: str) -> list[Path]:
    return sorted((java.spark_home() / "jars").glob(pattern))


def _build(part: str) -> bool:
    archive = ARCHIVES / f"{part}.jsa"
    archive.unlink(missing_ok=True)
    opens = java.SPARK_OPENS if part == "spark" else ()
    with tempfile.NamedTemporaryFile(suffix=".lst") as listed:
        listed.write(gzip.decompress((LISTS / f"{part}.lst.gz").read_bytes()))
        listed.flush()
        how = ["-Xshare:dump", f"-XX:SharedClassListFile={listed.name}", f"-XX:SharedArchiveFile={archive}.new"]
        command = [java.java(), *how, *opens, COLLECTOR.get(part, _SMALL), "-cp", class_path(part)]
        problem = _dumped(command)
    aside = Path(f"{archive}.new")
    if problem or not aside.is_file():
        aside.unlink(missing_ok=True)
        print(f"{part}: no class archive, it will start slower. {problem}")
        return False
    aside.replace(archive)
    return True


def _dumped(command: list[str]) -> str:
    """What went wrong, if anything did. A busy machine may do without: the archive only saves time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DUMP_SECONDS)
    except subprocess.TimeoutExpired:
        return f"It was not made within {_DUMP_SECONDS} s."
    return (done.stdout + done.stderr)[-300:] if done.returncode else ""


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    print(f"{build()} of {len(PARTS)} class archives made.")
