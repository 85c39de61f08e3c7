"""A finished job calls its client: signed so that the client's own library accepts it, once per end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from lockstep.exports.clients import ClientStore
from lockstep.exports.model import Limits
from lockstep.kernel.deliver import WebhookDeliverer
from lockstep.kernel.relay import Relay
from services.webhooks import PublicOnly, sign_for
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]]]]:
    calls: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            calls.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", calls
    server.shutdown()
    server.server_close()


def _relay(world: World, *, private: bool) -> None:
    with httpx.Client(transport=PublicOnly(private=private)) as client:
        deliverer = WebhookDeliverer(client, sign=sign_for(ClientStore(world.state)))
        lanes = [lane for (lane,) in world.ask("SELECT lane FROM kernel.outbox WHERE lane LIKE 'exports/webhook/%%'")]
        Relay(world.state, {"webhook": deliverer}, workers=2).run_once(lanes=lanes)


def test_the_end_of_a_job_is_told_with_a_signature_that_the_client_can_check(
    world: World, receiver: tuple[str, list[tuple[dict[str, str], bytes]]]
):
    url, calls = receiver
    world.limits = Limits(max_chunks=50, private_webhooks=True)
    job_id = world.submit(("ABC", "20250215"), webhook={"url": url})
    world.drain()
    _relay(world, private=True)
    ((headers, body),) = calls
    secret = ClientStore(world.state).webhook_secret(world.client.client.client_id)
    assert Webhook(secret).verify(body, headers)
    told = json.loads(body)
    assert (told["type"], told["data"]["jobId"], told["data"]["done"]) == ("export.job.completed", job_id, 1)
    stranger = ClientStore(world.state).add("stranger")
    with pytest.raises(WebhookVerificationError):
        Webhook(ClientStore(world.state).webhook_secret(stranger.client.client_id)).verify(body, headers)


def test_a_private_address_that_slipped_through_is_refused_at_delivery(
    world: World, receiver: tuple[str, list[tuple[dict[str, str], bytes]]]
):
    """Guards the second line: the address was accepted while private ones were allowed, and is called when not."""
    url, calls = receiver
    world.limits = Limits(max_chunks=50, private_webhooks=True)
    world.submit(("ABC", "20250215"), webhook={"url": url})
    world.drain()
    _relay(world, private=False)
    assert calls == []
    assert world.ask("SELECT count(*) FROM kernel.outbox WHERE parked_at IS NOT NULL") == [(1,)]
