"""Spark as a standalone cluster on this machine: a master and two workers, for `lockstep up --spark-cluster`.

What belongs here: their command lines and what the Connect server must know of them. What does not: the Connect server
itself and the list of parts (parts.py). Everything runs from the jars of the installed PySpark and listens on loopback.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from stack import classes, java
from stack.environment import LOOPBACK

if TYPE_CHECKING:
    from stack.parts import Site

WORKERS = (1, 2)
WORKER_CORES = 2
WORKER_MEMORY = "1g"
EXECUTOR_MEMORY = "768m"
# Spark's default is a minute. A killed worker is noticed at once by its broken connection; this is for a frozen one.
SILENT_SECONDS = 15

MASTER = "spark-master"
WORKER_NAMES = tuple(f"spark-worker-{number}" for number in WORKERS)


def address(site: Site) -> str:
    """The master as Spark writes it."""
    return f"spark://{LOOPBACK}:{site.ports['spark_master']}"


def driver_settings(site: Site) -> dict[str, str]:
    """What the Connect server is told in place of `local[4]`: as many slots, in two other processes."""
    return {
        "spark.master": address(site),
        "spark.executor.memory": EXECUTOR_MEMORY,
        "spark.executor.cores": str(WORKER_CORES),
        "spark.executor.extraJavaOptions": f"{java.SPARK_CODE} -Dlog4j2.configurationFile={_log_settings(site)}",
    }


def prepare_master(site: Site) -> None:
    """A new cluster remembers nothing: recovering applications of an earlier one would cost a minute."""
    shutil.rmtree(_recovery(site), ignore_errors=True)
    _recovery(site).mkdir(parents=True)
    write_log_settings(site)


def master_command(site: Site) -> list[str]:
    """The master keeps what it knows in files, so that it may be killed while work goes on."""
    return [
        *_java(site, "256m"),
        "-Dspark.deploy.recoveryMode=FILESYSTEM",
        f"-Dspark.deploy.recoveryDirectory={_recovery(site)}",
        *classes.flags("spark"),
        "org.apache.spark.deploy.master.Master",
        *("--host", LOOPBACK, "--port", str(site.ports["spark_master"])),
        *("--webui-port", str(site.ports["spark_master_ui"])),
    ]


def prepare_worker(site: Site, number: int) -> None:
    """Make the folders of a worker and the `java` that its executors start with."""
    for folder in (_work(site, number), _scratch(site, number)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    write_log_settings(site)
    program = site.home.run / "executor-java" / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(_executor_java())
    program.chmod(0o755)


def worker_command(site: Site, number: int) -> list[str]:
    """A worker starts executors as its children; they end when it ends."""
    return [
        *_java(site, "256m"),
        f"-Dspark.local.dir={_scratch(site, number)}",
        *classes.flags("spark"),
        "org.apache.spark.deploy.worker.Worker",
        *("--host", LOOPBACK, "--port", str(site.ports[f"spark_worker_{number}"]), "--webui-port", "0"),
        *("--cores", str(WORKER_CORES), "--memory", WORKER_MEMORY, "--work-dir", str(_work(site, number))),
        address(site),
    ]


def worker_environment(site: Site) -> dict[str, str]:
    """Executors are started with the `java` below JAVA_HOME."""
    return {"JAVA_HOME": str(site.home.run / "executor-java")}


def write_log_settings(site: Site) -> None:
    """Warnings go to the log of the part, as one line each."""
    _log_settings(site).write_text(
        "rootLogger.level = warn\nrootLogger.appenderRef.out.ref = out\n"
        "appender.out.type = Console\nappender.out.name = out\nappender.out.target = SYSTEM_ERR\n"
        "appender.out.layout.type = PatternLayout\n"
        "appender.out.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex\n"
    )


def _log_settings(site: Site) -> Path:
    return site.home.run / "log4j2.properties"


def _java(site: Site, heap: str) -> list[str]:
    quiet = f"-Dlog4j2.configurationFile={_log_settings(site)}"
    return [java.java(), f"-Xmx{heap}", *java.SPARK_OPENS, quiet, f"-Dspark.worker.timeout={SILENT_SECONDS}"]


def _executor_java() -> str:
    """Spark's launcher asks for a module that the wheel's runtime lacks, and names its jars by a wildcard.

    The script leaves the module out, and gives the class path of the Connect server instead: it has the jars of Delta
    and S3 too, and fits the class archive.
    """
    flags = " ".join(shlex.quote(word) for word in classes.flags("spark"))
    return f"""#!/bin/sh
left=$# skip=
while [ $left -gt 0 ]; do
  word=$1; shift; left=$((left - 1))
  if [ -n "$skip" ]; then skip=; continue; fi
  case $word in
    --add-modules=jdk.incubator.vector) ;;
    -cp) skip=yes ;;
    *) set -- "$@" "$word" ;;
  esac
done
exec {shlex.quote(java.java())} {flags} "$@"
"""


def _recovery(site: Site) -> Path:
    return site.home.data("spark") / "master"


def _work(site: Site, number: int) -> Path:
    return site.home.data("spark") / f"work-{number}"


def _scratch(site: Site, number: int) -> Path:
    return site.home.data("spark") / f"local-{number}"
