"""Where webhooks may go: decided by the address that is really connected to, not by what its name promises."""

from __future__ import annotations

import httpx
import pytest

from services.webhooks import PublicOnly, is_public

PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",  # noqa: S104
    "224.0.0.1",
    "::1",
    "fe80::1%eth0",
    "fd00::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "2002:7f00:1::",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::808:808",
    "::7f00:1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_of_the_open_internet_is_private(address: str):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_an_address_of_the_open_internet_is_public(address: str):
    assert is_public(address)


class _Recorder(httpx.BaseTransport):
    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(204)


def _post(url: str, addresses: list[str], **options: bool) -> list[httpx.Request]:
    wire = _Recorder()
    guard = PublicOnly(resolve=lambda host, port: addresses, inner=wire, **options)
    with httpx.Client(transport=guard) as client:
        client.post(url, json={})
    return wire.requests


def test_the_connection_goes_to_the_address_that_was_checked_under_the_name_that_was_asked():
    """Guards against a name server that answers twice: public when checked, private when connected."""
    (request,) = _post("https://hooks.example.com:8443/x?y=1", ["8.8.8.8", "1.1.1.1"])
    assert str(request.url) == "https://8.8.8.8:8443/x?y=1"
    assert request.headers["host"] == "hooks.example.com:8443"
    assert request.extensions["sni_hostname"] == "hooks.example.com"


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], []])
def test_a_name_with_any_private_address_is_never_called(addresses: list[str]):
    with pytest.raises(httpx.UnsupportedProtocol):
        _post("https://hooks.example.com/", addresses)


def test_plain_http_is_refused_unless_private_addresses_are_allowed():
    with pytest.raises(httpx.UnsupportedProtocol):
        _post("http://hooks.example.com/", ["8.8.8.8"])
    assert _post("http://hooks.example.com/", ["127.0.0.1"], private=True)
