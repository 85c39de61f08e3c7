"""Starting a service: settings, logging, uvicorn, a graceful end.

What belongs here: the process around an application. What does not: the application (shell.py).
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

import uvicorn
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import configure_logging
from lockstep.kernel.settings import Settings, settings

SERVICES = ("exports", "ingest", "readiness", "vault", "relay")
LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 20  # what a request in progress gets after SIGTERM before it is cut


def serve(name: str, host: str = LOOPBACK, port: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests in progress are finished first.

    Raises:
        InvalidInput: No such service, or no port is known for it.
    """
    if name not in SERVICES:
        raise InvalidInput(f"there is no service {name}.", next_step=f"choose one of {', '.join(SERVICES)}.")
    current = settings()
    configure_logging(current.log_level, current.log_format, service=name, secrets=_secrets(current))
    # uvicorn repeats the signal once it has ended well; without a handler the process would die of it after all.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(
        import_module(f"services.{name}").create_app(current),
        host=host,
        port=port or _port(current, name),
        log_config=None,  # uvicorn's own handlers would bypass redaction
        access_log=False,  # the shell writes one line per request, with its trace
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def _port(current: Settings, name: str) -> int:
    port: int | None = getattr(current, f"{name}_port")
    if port is None:
        raise InvalidInput(f"no port is known for {name}.", next_step=f"set LOCKSTEP_{name.upper()}_PORT.")
    return port


def _secrets(current: Settings) -> list[SecretStr]:
    found = (
        current.postgres_dsn,
        current.source_dsn,
        current.warehouse_dsn,
        current.vault_password,
        current.ticks_keys,
    )
    return [secret for secret in found if secret is not None]
