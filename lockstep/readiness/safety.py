"""What configuration may not do: reach private addresses, run a shell, read the environment.

What belongs here: checks, at load and again at the moment of use, because a name may resolve differently by then. What
does not: the deployment's list of allowed hosts, which is passed in.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from lockstep.kernel.errors import Terminal

TEMPLATE_VARIABLES: Final = ("date", "hour", "scheduleID", "pipelineID", "runID", "attempt")
SECRET_PREFIX: Final = "secret:"  # noqa: S105  # the mark of a reference, not a secret
_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}?|\$[A-Za-z_]\w*")
_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "ash", "busybox", "cmd", "env"})

# NAT64, 6to4 and Teredo: global by their prefix, and any IPv4 address inside.
_TRANSLATED: Final = tuple(
    ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)

Resolve = Callable[[str, int], list[str]]


class Forbidden(Terminal):
    """The address or program is refused by the safety rules; nothing was called."""


def check_address(url: str) -> str:
    """An http(s) address without credentials; literal private addresses are judged when the call is made."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http(s) address")
    if parts.username or parts.password:
        raise ValueError("credentials do not belong in an address; use a header with secret:<name>")
    if "$" in parts.netloc:
        raise ValueError("the host cannot be a variable")
    return url


def check_argv(argv: list[str]) -> list[str]:
    """A program and its arguments; no shell in front."""
    if not argv or not argv[0]:
        raise ValueError("name a program")
    if PurePath(argv[0]).name.lower().removesuffix(".exe") in _SHELLS:
        raise ValueError("a shell is not allowed here; name the program itself with its arguments")
    return argv


def check_templates(value: Any, place: str) -> None:
    """Refuse `${NAME}` unless it is one of ours: a configuration must not read the environment."""
    if isinstance(value, str):
        for match in _VARIABLE.finditer(value):
            if match[1] not in TEMPLATE_VARIABLES:
                raise ValueError(
                    f"{place}: {match[0]} is not a template variable; "
                    f"use {', '.join('${' + name + '}' for name in TEMPLATE_VARIABLES)} or secret:<name>"
                )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_templates(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_templates(item, place)


def fill_in(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace the template variables, in text at any depth."""
    if isinstance(value, str):
        for name, text in variables.items():
            value = value.replace("${" + name + "}", text)
        return value
    if isinstance(value, Mapping):
        return {key: fill_in(item, variables) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_in(item, variables) for item in value]
    return value


def reveal(headers: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Headers with `secret:<name>` replaced by the secret of that name, which the deployment gives."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        key = value.removeprefix(SECRET_PREFIX)
        if key != value and key not in secrets:
            raise Forbidden(f"there is no secret {key}.", next_step="give it to the process that runs readiness.")
        found[name] = value if key == value else secrets[key]
    return found


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody on the internet could own."""
    ip = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    if ip.version == 6:
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif any(ip in network for network in _TRANSLATED):
            return False  # a gateway would take it to an IPv4 address that nobody has looked at
    return ip.is_global and not ip.is_multicast


def resolve_host(host: str, port: int) -> list[str]:
    """Every address that the name has now."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})


class GuardedTransport(httpx.BaseTransport):
    """Calls only public addresses and hosts that the deployment allows, and the very address that was checked."""

    def __init__(
        self,
        allowed: Collection[str] = (),
        *,
        inner: httpx.BaseTransport | None = None,
        resolve: Resolve = resolve_host,
    ) -> None:
        self._allowed = frozenset(allowed)
        self._inner = inner or httpx.HTTPTransport()
        self._resolve = resolve

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Check the host's addresses, then connect to one of exactly those: a second lookup could say otherwise."""
        host = request.url.host
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        if host in self._allowed or f"{host}:{port}" in self._allowed:
            return self._inner.handle_request(request)
        try:
            addresses = self._resolve(host, port)
        except OSError as error:
            raise httpx.ConnectError(f"{host} has no address: {error}", request=request) from error
        refused = [address for address in addresses if not is_public(address)]
        if refused or not addresses:
            raise Forbidden(
                "the address is private.",
                unit=host,
                next_step="allow the host in LOCKSTEP_READINESS_ALLOWED_HOSTS if it is meant.",
            )
        request.headers.setdefault("Host", request.url.netloc.decode("ascii"))
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = request.url.copy_with(host=addresses[0])
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


def guarded_client(allowed: Collection[str] = (), *, timeout: float = 30.0) -> httpx.Client:
    """A client for addresses that configuration names. Redirects are refused: their target was not checked."""
    return httpx.Client(transport=GuardedTransport(allowed), timeout=timeout, follow_redirects=False, trust_env=False)
