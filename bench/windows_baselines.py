"""What the platform is measured against: a loader as one writes it in an afternoon, and dlt.

What belongs here: the baselines, each at its best. What does not: the platform (windows_platform.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.windows_files import COLUMNS, OBJECTS, Published
from lockstep.kernel import postgres
from lockstep.windows.model import FileType, file_key
from stack.jars import cache_folder

if TYPE_CHECKING:
    from bench.windows_platform import Platform

_SCHEMA = "bench_by_hand"
_SECONDS = 300
_PACKAGES = ("dlt[postgres]>=1.5", "pyarrow", "boto3")


def by_hand(platform: Platform, windows: Sequence[Published]) -> None:
    """GET, COPY to a temporary table, merge, commit, window by window: no check, no ledger, no watermark."""
    columns = ", ".join(COLUMNS)
    sets = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])
    with postgres.connect(platform.dsn, application_name="bench-by-hand") as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {_SCHEMA} CASCADE")
        connection.execute(f"CREATE SCHEMA {_SCHEMA}")
        for number in range(OBJECTS):
            connection.execute(
                f"CREATE TABLE {_SCHEMA}.object_{number}__v (id text PRIMARY KEY, "
                "modified_date__v timestamptz, name__v text, amount__c numeric, status__v text)"
            )
        for window, _ in windows:
            with connection.transaction():
                for number in range(OBJECTS):
                    key = file_key(window, f"object_{number}__v", FileType.UPSERT)
                    body = platform.s3.get_object(Bucket=platform.bucket, Key=key)["Body"].read()
                    target = f"{_SCHEMA}.object_{number}__v"
                    connection.execute(f"CREATE TEMP TABLE staged (LIKE {target}) ON COMMIT DROP")
                    with connection.cursor().copy("COPY staged FROM STDIN (FORMAT csv, HEADER)") as copy:
                        copy.write(body)
                    connection.execute(
                        f"INSERT INTO {target} SELECT {columns} FROM staged "  # noqa: S608
                        f"ON CONFLICT (id) DO UPDATE SET {sets}".encode()
                    )
                    connection.execute("DROP TABLE staged")


def with_dlt(platform: Platform, windows: Sequence[Published], say: Callable[[str], None]) -> list[float] | None:
    """Seconds that dlt needs for each window, in an environment of its own; None, with a word, if it cannot be had."""
    python = _dlt_environment(cache_folder().parent / "dlt", say)  # kept: making it takes half a minute
    if python is None:
        return None
    work = [
        {
            f"object_{number}__v": file_key(one.window, f"object_{number}__v", FileType.UPSERT)
            for number in range(OBJECTS)
        }
        for one in windows
    ]
    order = {
        "bucket": platform.bucket,
        "dsn": platform.dsn,
        "windows": work,
        "folder": str(platform.home / "bench" / "work"),
    }
    script = Path(__file__).with_name("windows_dlt.py")
    done = subprocess.run(
        [str(python), str(script)],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env={**os.environ, "RUNTIME__DLTHUB_TELEMETRY": "false", "PYTHONPATH": ""},
    )
    if done.returncode:
        say(f"no vs_dlt: dlt failed: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}")
        return None
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _dlt_environment(folder: Path, say: Callable[[str], None]) -> Path | None:
    """An environment that holds dlt and nothing of ours: its pins must not decide ours."""
    python, uv = folder / "bin" / "python", Path(sys.executable).with_name("uv")
    commands = [[str(uv), "venv", "-q", "--python", sys.executable, str(folder)]] if not python.exists() else []
    commands.append([str(uv), "pip", "install", "-q", "--python", str(python), *_PACKAGES])
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            say(f"no vs_dlt: dlt cannot be installed here: {words[-1][:200] if words else error}")
            return None
    return python
