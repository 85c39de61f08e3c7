"""The one folder that holds everything the embedded stack writes, and what is remembered between starts.

Paths, chosen ports and generated credentials live here. No process is started here; see lifecycle.py.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import psutil

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import Settings

# Below the ranges from which Linux and macOS take the source ports of outgoing connections: a port chosen here and
# bound a few seconds later is not stolen in between.
_PORT_RANGE = range(20_000, 32_000)

LISTENERS = (
    "supervisor",
    "postgres",
    "dynamodb",
    "sqs",
    "s3",
    "spark",
    "dagster",
    "dagster_code",
    "exports",
    "ingest",
    "readiness",
    "vault",
    "relay",
    "spark_master",
    "spark_master_ui",
    "spark_worker_1",
    "spark_worker_2",
)


@dataclass(frozen=True)
class Home:
    """The folder of one stack. Two stacks with two homes do not know of each other."""

    root: Path

    @property
    def logs(self) -> Path:
        """One log per part, rotated."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Generated configuration, rewritten at every start."""
        return self.root / "run"

    @property
    def dagster(self) -> Path:
        """DAGSTER_HOME of the stack."""
        return self.root / "dagster"

    @property
    def lock(self) -> Path:
        """Held while a command changes the stack."""
        return self.root / "stack.lock"

    def data(self, part: str) -> Path:
        """The data of one part; survives `down` and any crash."""
        return self.root / "data" / part

    def prepare(self) -> None:
        """Create the folders, or say why this place cannot be used."""
        try:
            for folder in (self.root, self.logs, self.run, self.dagster, self.root / "data"):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise InvalidInput(
                f"the stack cannot write to {self.root}: {error.strerror}.",
                next_step="make it writable, or set LOCKSTEP_HOME to a folder that is.",
            ) from error

    # --- what is remembered -----------------------------------------------------------------------------------

    def ports(self) -> dict[str, int]:
        """The ports of the last start; empty if there was none or its record is unreadable."""
        try:
            ports = json.loads((self.root / "ports.json").read_text())
        except (OSError, ValueError):
            return {}
        return {name: port for name, port in ports.items() if name in LISTENERS and isinstance(port, int)}

    def choose_ports(self, settings: Settings) -> dict[str, int]:
        """Give every listener a port: the set one, else the one it had, else a free one. Only while stopped."""
        remembered, chosen = self.ports(), {}
        for name in LISTENERS:
            fixed = getattr(settings, f"{name}_port", None)  # the cluster's ports cannot be set
            if fixed is not None and not is_free(fixed):
                raise InvalidInput(
                    f"port {fixed} is taken{_taken_by(fixed)}.",
                    unit=name,
                    next_step=f"stop that process, or set LOCKSTEP_{name.upper()}_PORT to a free port, or unset it.",
                )
            before = remembered.get(name)
            kept = before if before and before not in chosen.values() and is_free(before) else None
            chosen[name] = fixed or kept or _free_port(set(chosen.values()))
        write_atomically(self.root / "ports.json", json.dumps(chosen, indent=1))
        return chosen

    @property
    def clustered(self) -> bool:
        """Whether Spark runs here as a cluster; decided when the stack is started, and kept until it is stopped."""
        return (self.root / "spark-cluster").exists()

    def remember_cluster(self, clustered: bool) -> None:
        """For the commands that follow: `status`, `restart`, `logs`."""
        mark = self.root / "spark-cluster"
        if clustered:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def credentials(self) -> dict[str, str]:
        """The passwords of the embedded parts: made once, readable by the owner only."""
        path = self.root / "credentials.json"
        if not path.exists():
            write_atomically(path, json.dumps(_made_credentials(), indent=1), mode=0o600)
        try:
            known = dict(json.loads(path.read_text()))
        except ValueError as error:
            raise InvalidInput(
                f"{path} is damaged: {error}.",
                next_step="restore it; without it the data cannot be opened and only `lockstep reset --yes` helps.",
            ) from error
        complete = _made_credentials() | known
        if complete.keys() != known.keys():  # a home of an earlier release: what it has stays, what is new is added
            write_atomically(path, json.dumps(complete, indent=1), mode=0o600)
        return complete


def _made_credentials() -> dict[str, str]:
    return {
        "postgres_password": secrets.token_urlsafe(24),
        "aws_access_key_id": "lockstep",  # DynamoDB Local takes letters and digits only
        "aws_secret_access_key": secrets.token_hex(20),
        "supervisor_password": secrets.token_hex(20),
        "ticks_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),  # the shape of a Fernet key
    }


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file so that a crash leaves the old one or the new one, never half of one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside = Path(name)
    aside.chmod(mode)
    aside.replace(path)


def is_free(port: int) -> bool:
    """Whether a listener could bind this port on loopback right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port(taken: set[int]) -> int:
    for port in SystemRandom().sample(_PORT_RANGE, len(_PORT_RANGE)):
        if port not in taken and is_free(port):
            return port
    raise InvalidInput("no free port was found.", next_step="stop some servers, or set the LOCKSTEP_*_PORT variables.")


def _taken_by(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return f" by process {connection.pid}" if connection.pid else ""
    except psutil.Error:
        pass  # not every system lets a user list the connections of others
    return ""
