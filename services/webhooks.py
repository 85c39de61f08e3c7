"""Webhooks of clients: signed as Standard Webhooks says, and sent only to addresses that are public.

What belongs here: the signature and the guard that the relay gives to its HTTP client. What does not: retries and
order (lockstep/kernel/relay.py), and when a webhook is sent (lockstep/exports/ledger.py).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx
from standardwebhooks.webhooks import Webhook

from lockstep.exports.clients import ClientStore
from lockstep.kernel.deliver import Sign

Resolve = Callable[[str, int], list[str]]

_NAT64 = ip_network("64:ff9b::/96")  # a translator sends on to the IPv4 address in the last four bytes
_NEVER = (ip_network("::/96"), ip_network("64:ff9b:1::/48"))  # IPv4 in dead clothes; a translator of the local network


def sign_for(clients: ClientStore) -> Sign:
    """Signs a message with the key of the client whose job it is about; a message of nobody's is not signed."""

    def sign(identity: str, moment: int, body: bytes) -> Mapping[str, str]:
        text = body.decode()
        data = json.loads(text).get("data")
        job_id = data.get("jobId") if isinstance(data, dict) else None
        secret = clients.webhook_secret_of_job(job_id) if isinstance(job_id, str) else None
        if secret is None:
            return {}
        return {"webhook-signature": Webhook(secret).sign(identity, datetime.fromtimestamp(moment, tz=UTC), text)}

    return sign


class PublicOnly(httpx.BaseTransport):
    """Resolves the host itself, refuses anything that is not public, and connects to exactly the address it checked.

    Checking a name and then letting the library resolve it again would let a name server answer twice, first with a
    public address and then with ours.
    """

    def __init__(
        self, *, private: bool = False, resolve: Resolve | None = None, inner: httpx.BaseTransport | None = None
    ) -> None:
        self._private = private
        self._resolve = resolve or _resolve
        self._inner = inner or httpx.HTTPTransport(retries=0)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send, or raise `UnsupportedProtocol`, which the relay takes as final."""
        url = request.url
        if url.scheme != "https" and not self._private:
            raise httpx.UnsupportedProtocol("webhooks need https.", request=request)
        try:
            addresses = self._resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        except OSError as error:
            raise httpx.ConnectError(f"{url.host} cannot be resolved: {error}", request=request) from error
        if not addresses or (not self._private and not all(is_public(one) for one in addresses)):
            raise httpx.UnsupportedProtocol(f"{url.host} is not a public address.", request=request)
        request.headers["Host"] = url.netloc.decode()
        request.extensions = {**request.extensions, "sni_hostname": url.host}
        request.url = url.copy_with(host=addresses[0])
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the open internet, also when it is an IPv4 address in IPv6 clothes."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        if any(parsed in network for network in _NEVER):
            return False
        translated = IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else None
        inner = translated or parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is not None:
            return inner.is_global and parsed.ipv4_mapped is None
    return parsed.is_global and not parsed.is_multicast


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
