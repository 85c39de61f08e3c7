"""`make setup`: from a bare Python to a working `.venv` and a filled jar cache. Instant when nothing changed.

Runs before anything is installed, so this module uses the standard library only and imports nothing of the project.
Every failure a newcomer can meet (wrong Python, no network, full disk) ends in one line that says what to do.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "lockstep-setup.sha256"
LOCK = ROOT / "requirements.lock"
LOG = "lockstep-setup.log"
INPUTS = (
    LOCK,
    ROOT / "pyproject.toml",
    ROOT / "stack" / "jars.lock",
    *sorted((ROOT / "stack" / "class_lists").glob("*.gz")),
    Path(__file__),
)
OLDEST, NEWEST = (3, 11), (3, 13)
DISK_NEEDED_GB = 4.0

NETWORK_WORDS = re.compile(
    r"failed to fetch|error sending request|name resolution|dns error|connection (refused|reset|aborted|error)|"
    r"timed out|network is unreachable|could not be downloaded|could not be resolved|max retries|"
    r"no matching distribution found for uv",
    re.IGNORECASE,
)
DISK_WORDS = re.compile(r"no space left|disk quota|os error 28|errno 28", re.IGNORECASE)


class SetupError(Exception):
    """A failure with the one line that the user needs."""


def main() -> int:
    """Set up if anything changed; return the exit code."""
    try:
        check_python(sys.version_info[:2])
        fingerprint = fingerprint_of(INPUTS)
        if is_current(fingerprint):
            return 0
        started = time.monotonic()
        set_up()
        STAMP.write_text(fingerprint)
        say(f"ready in {time.monotonic() - started:.0f} s")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run `make setup` again to go on where it stopped.", file=sys.stderr)
        return 130
    return 0


def check_python(version: tuple[int, ...]) -> None:
    """Refuse an interpreter that the locked packages have no wheels for."""
    if not OLDEST <= tuple(version) <= NEWEST:
        found = ".".join(map(str, version))
        raise SetupError(
            f"Python {found} cannot be used: Lockstep needs 3.11 to 3.13. "
            "Install one of them and run `make PYTHON=python3.11 setup`."
        )


def check_disk(folder: Path, free_bytes: int | None = None) -> None:
    """Refuse to start what a full disk would break half-way."""
    free = (shutil.disk_usage(folder).free if free_bytes is None else free_bytes) / 1e9
    if free < DISK_NEEDED_GB:
        raise SetupError(
            f"disk full: {folder} has {free:.1f} GB free and the first setup needs {DISK_NEEDED_GB:.0f} GB. "
            "Free some space and run `make setup` again."
        )


def fingerprint_of(inputs: tuple[Path, ...]) -> str:
    """A digest of everything that decides what is installed, the interpreter and the folder included."""
    digest = hashlib.sha256(f"{sys.version}|{ROOT}".encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(fingerprint: str) -> bool:
    """Whether `.venv` was made from exactly these inputs and its interpreter still exists."""
    return STAMP.is_file() and STAMP.read_text() == fingerprint and venv_python().exists()


def set_up() -> None:
    """Bring `.venv` and the jar cache to the locked state."""
    check_disk(ROOT)
    STAMP.unlink(missing_ok=True)
    make_venv()
    install_uv()
    say("2/5 Python packages, locked by hash (the first time this takes a few minutes)")
    uv = [str(VENV / "bin" / "uv"), "pip"]
    target = ["--python", str(venv_python())]
    # Bytecode now, once, instead of at the start of every run: it halves the start of a Dagster run.
    run([*uv, "sync", *target, "--require-hashes", "--compile-bytecode", str(LOCK)], "the Python packages")
    say("3/5 Lockstep itself, in place")
    run([*uv, "install", *target, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], "Lockstep")
    say("4/5 Java archives of the embedded parts (190 MB, cached for every clone)")
    run([str(venv_python()), "-m", "stack.jars"], "the Java archives")
    say("5/5 class archives, so that the Java parts start in seconds")
    run([str(venv_python()), "-m", "stack.classes"], "the class archives")


def make_venv() -> None:
    """Create `.venv`, or replace one whose interpreter is gone or of another version."""
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if venv_python().exists() and wanted in venv_version():
        return
    say(f"1/5 virtual environment with Python {wanted}")
    shutil.rmtree(VENV, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(VENV)], "the virtual environment")


def install_uv() -> None:
    """Install uv into `.venv` with pip, at the version and hashes of the lock."""
    pinned = requirement_block("uv", LOCK.read_text())
    wanted = pinned.split("==")[1].split()[0]
    uv = VENV / "bin" / "uv"
    if uv.exists() and wanted in capture([str(uv), "--version"]):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(pinned)
        requirements.flush()
        pip = [str(venv_python()), "-m", "pip", "--disable-pip-version-check"]
        run([*pip, "install", "--quiet", "--require-hashes", "-r", requirements.name], "uv")


def requirement_block(name: str, lock: str) -> str:
    """The lines of the lock that pin one package, hashes included."""
    found = re.search(rf"^{name}==(?:[^\n]*\\\n)*[^\n]*", lock, re.MULTILINE)
    if not found:
        raise SetupError(f"requirements.lock does not pin {name}; restore the file from git.")
    return found.group(0)


def run(command: list[str], what: str) -> None:
    """Run one step; its output goes to the log, and a failure becomes one line."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SetupError(f"{what}: {error.strerror or error}.") from error
    output = done.stdout + done.stderr
    if VENV.is_dir():
        with (VENV / LOG).open("a") as log:
            log.write(f"$ {' '.join(command)}\n{output}\n")
    if done.returncode:
        raise SetupError(explain(output, what))


def explain(output: str, what: str) -> str:
    """Turn a tool's failure into one line that says what to do."""
    details = f"Details: {VENV.name}/{LOG}"
    if DISK_WORDS.search(output):
        return f"disk full while installing {what}. Free some space and run `make setup` again. {details}"
    if "ensurepip is not available" in output:
        return "this Python has no venv module. Install it (Debian: python3-venv) and run `make setup` again."
    if NETWORK_WORDS.search(output):
        return f"no network: {what} could not be downloaded. Check the connection and run `make setup` again. {details}"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")
    return f"{what} could not be installed: {last[:200]} {details}"


def venv_python() -> Path:
    """The interpreter inside `.venv`."""
    return VENV / "bin" / "python"


def venv_version() -> str:
    """The version line of the virtual environment."""
    config = VENV / "pyvenv.cfg"
    return config.read_text() if config.is_file() else ""


def capture(command: list[str]) -> str:
    """A command's output, empty if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def say(message: str) -> None:
    """Tell the user where the setup is."""
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
