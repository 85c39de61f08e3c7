"""The process manager: supervisord's configuration and a small client of its XML-RPC interface.

supervisord gives child processes, restart with backoff, a visible FATAL state, log rotation and remote control. What it
lacks is here or beside it: health-gated order (lifecycle.py), restart counts (the RPC extension below) and finding
processes after its own violent death (orphans.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import Terminal, Transient
from stack.environment import LOOPBACK, MEMBER_MARK
from stack.home import Home, write_atomically
from stack.parts import Part, Site

# A part that dies within this many seconds of its start counts as a failed start: it is tried again a little later
# each time, and after START_RETRIES it is left FATAL, for a person to see. A later death restarts it at once.
START_SECONDS = 10
START_RETRIES = 5
LOG_BYTES, LOG_BACKUPS = "10MB", 3


def render(site: Site, parts: Iterable[Part]) -> str:
    """The configuration file of supervisord for these parts."""
    home, password = site.home, site.home.credentials()["supervisor_password"]
    header = f"""[supervisord]
nodaemon=false
logfile={home.logs / "supervisor.log"}
logfile_maxbytes={LOG_BYTES}
logfile_backups={LOG_BACKUPS}
pidfile={home.run / "supervisord.pid"}
childlogdir={home.logs}
directory={home.root}
minfds=1024
{_user_line("root")}
[inet_http_server]
port={LOOPBACK}:{site.ports["supervisor"]}
username=lockstep
password={password}

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[rpcinterface:lockstep]
supervisor.rpcinterface_factory = stack.supervisor:make_restart_counter
"""
    return header + "".join(_program(site, part) for part in parts)


def _program(site: Site, part: Part) -> str:
    command = " ".join(_quoted(word) for word in part.command(site))
    variables = dict(site.environment) | part.environment(site)
    pairs = ",".join(f"{name}={_quoted(value)}" for name, value in sorted(variables.items()))
    return f"""
[program:{part.name}]
command={_escaped(command)}
environment={_escaped(pairs)}
directory={site.home.root}
autostart=false
autorestart=true
startsecs={START_SECONDS}
startretries={START_RETRIES}
stopsignal={part.stop_signal}
stopwaitsecs={part.stop_seconds}
stopasgroup=false
killasgroup=true
redirect_stderr=true
stdout_logfile={site.home.logs / f"{part.name}.log"}
stdout_logfile_maxbytes={LOG_BYTES}
stdout_logfile_backups={LOG_BACKUPS}
{_user_line(part.system_user)}"""


def _user_line(user: str | None) -> str:
    return f"user={user}\n" if user and os.geteuid() == 0 else ""


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # supervisord expands %(name)s


class Supervisor:
    """One supervisord, spoken to through its port on loopback."""

    def __init__(self, home: Home, port: int) -> None:
        self._home = home
        credentials = f"lockstep:{home.credentials()['supervisor_password']}"
        self._url = f"http://{credentials}@{LOOPBACK}:{port}/RPC2"

    def _call(self, method: str, *arguments: object) -> Any:
        with xmlrpc.client.ServerProxy(self._url, transport=_BoundedTransport()) as proxy:
            return getattr(proxy, method)(*arguments)

    def alive(self) -> bool:
        """Whether this home's supervisord answers (a stranger on the port does not know the password)."""
        try:
            return str(self._call("supervisor.getState")["statename"]) in ("RUNNING", "RESTARTING")
        except (OSError, xmlrpc.client.Error):
            return False

    def launch(self, site: Site, parts: Iterable[Part]) -> None:
        """Start supervisord with no part running yet."""
        config = self._home.run / "supervisord.conf"
        write_atomically(config, render(site, parts), mode=0o600)
        done = subprocess.run(
            [str(Path(sys.executable).with_name("supervisord")), "-c", str(config)],
            env=_clean_environment() | {MEMBER_MARK: str(self._home.root)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode:
            raise Terminal(f"supervisord did not start: {(done.stderr or done.stdout).strip()[-500:]}")
        deadline = time.monotonic() + 15
        while not self.alive():
            if time.monotonic() > deadline:
                raise Transient("supervisord does not answer.", next_step="see `lockstep logs supervisor`.")
            time.sleep(0.05)

    def start(self, part: str) -> None:
        """Ask for a start; a part that already runs is left alone."""
        try:
            self._call("supervisor.startProcess", part, False)
        except xmlrpc.client.Fault as fault:
            if "ALREADY_STARTED" not in fault.faultString:
                raise Terminal(fault.faultString, unit=part, next_step=f"see `lockstep logs {part}`.") from fault

    def stop(self, part: str) -> None:
        """Stop a part and wait for its end."""
        try:
            self._call("supervisor.stopProcess", part, True)
        except xmlrpc.client.Fault as fault:
            if "NOT_RUNNING" not in fault.faultString:
                raise

    def processes(self) -> dict[str, dict[str, Any]]:
        """What supervisord knows of each part: state, pid, start time, reason of a failed start."""
        return {str(info["name"]): info for info in self._call("supervisor.getAllProcessInfo")}

    def restarts(self) -> dict[str, int]:
        """How often each part was started again since it was first asked for."""
        return {str(name): int(count) for name, count in self._call("lockstep.restarts").items()}

    def shutdown(self) -> None:
        """Ask supervisord to stop every part and itself."""
        self._call("supervisor.shutdown")


class _BoundedTransport(xmlrpc.client.Transport):
    """A transport that gives up: a stopped or hung supervisord must not hang its clients."""

    def make_connection(self, host: Any) -> Any:
        connection = super().make_connection(host)
        connection.timeout = 60
        return connection


def _clean_environment() -> dict[str, str]:
    drop = {
        "JAVA_HOME",
        "SPARK_HOME",
        "SPARK_REMOTE",
        "PYTHONPATH",
        "SPARK_LOCAL_IP",
        "_JAVA_OPTIONS",
        "CLASSPATH",
    }
    kept = {name: value for name, value in os.environ.items() if name not in drop and not name.startswith("PG")}
    return kept | {"PYTHONUNBUFFERED": "1"}


# --- runs inside supervisord ----------------------------------------------------------------------------------------


class _RestartCounter:
    """An RPC namespace of supervisord that counts starts: supervisord itself does not."""

    def __init__(self) -> None:
        from supervisor import events

        self._starts: dict[str, int] = {}
        events.subscribe(events.ProcessStateStartingEvent, self._count)

    def _count(self, event: Any) -> None:
        name = event.process.config.name
        self._starts[name] = self._starts.get(name, 0) + 1

    def restarts(self) -> dict[str, int]:
        """Starts beyond the first, per part."""
        return {name: count - 1 for name, count in self._starts.items()}


def make_restart_counter(supervisord: object, **config: object) -> _RestartCounter:
    """The factory that the configuration names."""
    return _RestartCounter()
