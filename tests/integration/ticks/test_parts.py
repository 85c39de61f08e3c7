"""Parts over HTTP on the real parts: answers, replacement, limits, strangers. Nothing refused is stored."""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from lockstep.kernel.clock import SystemClock
from lockstep.ticks.model import Limits
from lockstep.ticks.projects import Keyring, ProjectStore
from resources import ticks as resources_ticks
from tests.ticks_fixtures import new_tick_id, people, sha256
from tests.ticks_world import Sender, World, open_world, serving

pytestmark = pytest.mark.stack

BODY = people(3)
OTHER = people(4)


def test_a_part_is_stored_once_and_known_again(world: World, sender: Sender):
    tick = new_tick_id()
    first = sender.put(tick, 0, BODY)
    assert (first.status_code, first.json()["already_present"]) == (202, False)
    assert first.headers["etag"] == f'"{sha256(BODY)}"'
    again = sender.put(tick, 0, BODY)
    assert (again.status_code, again.json()["already_present"]) == (200, True)
    head = sender.http.head(sender.path(tick, "parts", "000"), headers=sender.headers)
    assert (head.status_code, head.headers["x-sha256"], head.headers["x-part-bytes"]) == (
        200,
        sha256(BODY),
        str(len(BODY)),
    )
    assert sender.http.head(sender.path(tick, "parts", 1), headers=sender.headers).status_code == 404
    assert len(world.objects(f"parts/{sender.secret.project_id}/{tick}/")) == 1


def test_other_bytes_are_never_taken_in_silence(world: World, sender: Sender):
    tick = new_tick_id()
    sender.put(tick, 0, BODY)
    refused = sender.put(tick, 0, OTHER)
    assert (refused.status_code, refused.json()["sha256"]) == (409, sha256(BODY))
    assert sender.put(tick, 0, OTHER, If_Match=f'"{"f" * 64}"').status_code == 412
    assert sender.put(tick, 1, OTHER, If_Match=f'"{"f" * 64}"').status_code == 412
    assert sender.put(tick, 0, OTHER, If_Match=f'"{sha256(BODY)}"').status_code == 202
    assert sender.get(tick).json()["parts_received"]["0"]["sha256"] == sha256(OTHER)
    removed = sender.http.delete(sender.path(tick, "parts", 0), headers=sender.headers)
    assert (removed.status_code, removed.json()) == (200, {"removed": 1})
    assert sender.http.delete(sender.path(tick, "parts", 0), headers=sender.headers).status_code == 404
    assert sender.put(tick, 0, BODY).status_code == 202
    assert len(world.objects(f"parts/{sender.secret.project_id}/{tick}/")) == 1, "what nothing names is gone"


def test_if_match_takes_what_rfc_9110_allows_and_refuses_the_rest_with_412(sender: Sender):
    """Guards against a condition that cannot be read: taken for none, it would remove what nobody meant."""
    tick = new_tick_id()
    address = sender.path(tick, "parts", 0)
    assert sender.put(tick, 0, BODY, If_Match="*").status_code == 412, "nothing is there"
    sender.put(tick, 0, BODY)
    for other in ('"v1"', f'W/"{sha256(BODY)}"', "", '"*"x'):
        assert sender.put(tick, 0, OTHER, If_Match=other).status_code == 412, other
        assert sender.http.delete(address, headers=sender.headers | {"If-Match": other}).status_code == 412, other
    assert sender.put(tick, 0, OTHER, If_Match="*").status_code == 202
    assert sender.put(tick, 0, BODY, If_Match=f'"v1", "{sha256(OTHER)}"').status_code == 202
    assert sender.http.delete(address, headers=sender.headers | {"If-Match": "*"}).status_code == 200


def test_a_deleted_tick_is_gone_with_its_parts(world: World, sender: Sender):
    draft = sender.put_all(sender.draft(BODY, OTHER))
    assert sender.http.delete(sender.path(draft.tick_id), headers=sender.headers).json() == {"removed": 2}
    assert sender.get(draft.tick_id).status_code == 404
    assert world.objects(f"parts/{sender.secret.project_id}/{draft.tick_id}/") == []
    assert sender.http.delete(sender.path(draft.tick_id), headers=sender.headers).status_code == 404


def test_the_parts_of_a_committed_tick_do_not_change(sender: Sender):
    draft = sender.send(BODY)
    assert sender.put(draft.tick_id, 0, BODY).status_code == 200, "an agent that starts over may put them again"
    assert sender.put(draft.tick_id, 0, OTHER).status_code == 409
    assert sender.put(draft.tick_id, 1, OTHER).status_code == 409
    for path in (sender.path(draft.tick_id), sender.path(draft.tick_id, "parts", 0)):
        assert sender.http.delete(path, headers=sender.headers).status_code == 409
    seen = sender.get(draft.tick_id).json()
    assert (seen["state"], seen["sequence"], seen["expires_at"]) == ("committed", 1, None)
    assert seen["result"]["status"] == "committed"


def test_content_digest_is_as_good_as_x_sha256(sender: Sender):
    digest = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    headers = sender.headers | {"Content-Digest": f"sha-256=:{digest}:"}
    assert sender.http.put(sender.path("t", "parts", 0), content=BODY, headers=headers).status_code == 202


def test_racing_puts_of_one_number_have_one_winner(world: World, sender: Sender):
    tick, bodies = new_tick_id(), [people(3, word=f"w{one}") for one in range(8)]
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(lambda body: sender.put(tick, 0, body).status_code, bodies))
    assert sorted(answers) == [202] + [409] * 7
    assert len(world.objects(f"parts/{sender.secret.project_id}/{tick}/")) == 1


# --- strangers --------------------------------------------------------------------------------------------------------


def _stored(world: World) -> tuple[int, int]:
    return len(world.objects()), int(world.ask("SELECT count(*) FROM ticks.tick")[0][0])


@pytest.mark.parametrize(
    ("segments", "status"),
    [
        (("..", "t", "0"), 404),
        (("%2e%2e", "t", "0"), 404),
        (("{project}", "..", "0"), 422),
        (("{project}", "%2e%2e%2f%2e%2e", "0"), 404),
        (("{project}", "..%5c..", "0"), 422),
        (("{project}", "a%00b", "0"), 422),
        (("{project}", ".hidden", "0"), 422),
        (("{project}", "t", "..%2f1"), 404),
        (("{project}", "t", "-1"), 422),
        (("{project}", "t", "0x1"), 422),
        (("{project}", "t", "1e3"), 422),
        (("{project}", "t", "99999999"), 422),
        (("{project}", "x" * 200, "0"), 422),
    ],
)
def test_no_segment_leads_out_of_its_folder(world: World, sender: Sender, segments: tuple[str, ...], status: int):
    before = _stored(world)
    project, tick, number = (one.replace("{project}", sender.secret.project_id) for one in segments)
    address = urlsplit(world.url)
    raw = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)  # httpx would tidy the path
    raw.putrequest("PUT", f"/v1/projects/{project}/ticks/{tick}/parts/{number}", skip_accept_encoding=True)
    for name, value in (sender.headers | {"X-Sha256": sha256(BODY), "Content-Length": str(len(BODY))}).items():
        raw.putheader(name, value)
    raw.endheaders(BODY)
    answer = raw.getresponse()
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    raw.close()
    assert _stored(world) == before


def test_a_body_needs_its_length_its_digest_and_some_bytes(world: World, sender: Sender):
    before = _stored(world)
    path = sender.path("t-refused", "parts", 0)
    chunked = sender.http.put(path, content=iter([BODY]), headers=sender.headers | {"X-Sha256": sha256(BODY)})
    assert (chunked.status_code, chunked.json()["type"]) == (411, "/problems/length-required")
    assert sender.http.put(path, content=BODY, headers=sender.headers).status_code == 400
    assert sender.http.put(path, content=b"", headers=sender.headers | {"X-Sha256": sha256(b"")}).status_code == 400
    wrong = sender.http.put(path, content=BODY, headers=sender.headers | {"X-Sha256": sha256(OTHER)})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "/problems/digest-mismatch")
    assert _stored(world) == before


def _raw(world: World, sender: Sender, length: int, body: bytes, *, tick: str = "t-raw") -> socket.socket:
    address = urlsplit(world.url)
    line = socket.create_connection((str(address.hostname), address.port or 80), timeout=30)
    headers = sender.headers | {"Host": "x", "X-Sha256": sha256(BODY), "Content-Length": str(length)}
    head = f"PUT /v1/projects/{sender.secret.project_id}/ticks/{tick}/parts/0 HTTP/1.1\r\n"
    line.sendall((head + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n").encode() + body)
    return line


def test_a_length_that_lies_stores_nothing(world: World, sender: Sender):
    before = _stored(world)
    short = _raw(world, sender, len(BODY) + 100, BODY)
    short.shutdown(socket.SHUT_WR)
    short.recv(65536)
    short.close()
    long = _raw(world, sender, 10, BODY)
    assert b" 400 " in long.recv(65536).split(b"\r\n", 1)[0]
    long.close()
    time.sleep(0.2)
    assert _stored(world) == before


def test_credentials_are_401_and_other_projects_404(world: World, sender: Sender):
    other, sibling = world.sender(), world.sender(sender.secret.org_id)
    bad: list[dict[str, str]] = [
        {},
        {"X-Api-Key": sender.secret.org_id},
        {"X-Api-Secret": sender.secret.api_secret},
        {"X-Api-Key": sender.secret.org_id, "X-Api-Secret": sender.secret.api_secret[:-1] + "x"},
        {"X-Api-Key": other.secret.org_id, "X-Api-Secret": sender.secret.api_secret},
        {"X-Api-Key": sender.secret.org_id, "X-Api-Secret": "' OR 1=1 --"},
        {"X-Api-Key": "", "X-Api-Secret": ""},
    ]
    for headers in bad:
        for call in (sender.http.get, sender.http.delete):
            answer = call(sender.path("t"), headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthorized")
            assert "www-authenticate" in answer.headers
    committed = other.send(people(1))
    for foreign in (other, sibling):
        for method, path in (
            ("GET", foreign.path(committed.tick_id)),
            ("DELETE", foreign.path(committed.tick_id)),
            ("PUT", foreign.path(committed.tick_id, "parts", 9)),
            ("POST", foreign.path(committed.tick_id, "finalize")),
            ("GET", f"{world.url}/v1/projects/{foreign.secret.project_id}/status"),
        ):
            answer = sender.http.request(
                method, path, headers=sender.headers | {"X-Sha256": sha256(BODY)}, content=BODY
            )
            assert answer.status_code == 404, (method, path)


def test_two_secrets_work_during_a_rotation_and_none_after_a_revocation(world: World, sender: Sender):
    store = ProjectStore(world.state, Keyring(world.settings.ticks_keys))
    old = sender.headers
    project = sender.secret.project_id

    def status(headers: dict[str, str]) -> int:
        return sender.http.get(f"{world.url}/v1/projects/{project}/status", headers=headers).status_code

    middle = {**old, "X-Api-Secret": store.rotate(project, overlap=timedelta(hours=1), actor="t").api_secret}
    assert (status(old), status(middle)) == (200, 200)
    new = {**old, "X-Api-Secret": store.rotate(project, overlap=timedelta(hours=1), actor="t").api_secret}
    assert (status(old), status(middle), status(new)) == (401, 200, 200)
    last = {**old, "X-Api-Secret": store.rotate(project, overlap=timedelta(0), actor="t").api_secret}
    assert (status(new), status(last)) == (401, 200)
    store.revoke(project, actor="t")
    assert status(last) == 401
    actions = [row[0] for row in world.ask("SELECT action FROM ticks.audit WHERE subject = %s ORDER BY id", project)]
    assert actions == ["project.add", "project.rotate", "project.rotate", "project.rotate", "project.revoke"]
    (sealed,) = world.ask("SELECT sealed FROM ticks.secret WHERE project_id = %s LIMIT 1", project)[0]
    assert sender.secret.api_secret.encode() not in bytes(sealed)


def test_the_status_and_the_limits_are_told(world: World, sender: Sender):
    draft = sender.send(people(1))
    sender.put(new_tick_id(), 0, BODY)
    body = sender.http.get(f"{world.url}/v1/projects/{sender.secret.project_id}/status", headers=sender.headers).json()
    assert (body["head_tick_id"], body["sequence"]) == (draft.tick_id, 1)
    assert body["ticks"] == {"uploading": 1, "finalizing": 0, "committed": 1, "failed": 0}
    limits = sender.http.get(f"{world.url}/v1/limits", headers=sender.headers).json()
    assert limits["max_part_bytes"] == 128 * 1024 * 1024
    for name in ("part-conflict", "invalid-manifest"):
        assert sender.http.get(f"{world.url}/problems/{name}").json()["meaning"]


# --- small limits -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(stack: Any) -> Iterator[World]:
    """A deployment that allows little."""
    limits = Limits(
        max_part_bytes=50_000,
        max_manifest_bytes=20_000,
        max_parts=3,
        max_open_ticks=3,
        max_open_bytes=30_000,
        body_idle_seconds=0.5,
        upload_days=1.0,
        requests_per_second=1000,
        request_burst=1000,
    )
    with open_world(stack) as made, ExitStack() as running:
        with pytest.MonkeyPatch.context() as patch:  # only while the replica starts: other tests have other limits
            patch.setattr(resources_ticks, "tick_limits", lambda _: limits)
            patch.setattr("services.ingest.tick_limits", lambda _: limits)
            made.url = running.enter_context(serving(made))
        yield made


def test_limits_are_kept_before_anything_is_stored(tight: World):
    sender = tight.sender()
    large = sender.put("t", 0, b"x" * 50_001)
    assert (large.status_code, large.json()["type"]) == (413, "/problems/content-too-large")
    for number in range(3):
        assert sender.put("t", number, people(3, number)).status_code == 202
    full = sender.put("t", 3, BODY)
    assert (full.status_code, full.json()["type"]) == (413, "/problems/tick-too-large")
    for tick in ("t2", "t3"):
        assert sender.put(tick, 0, BODY).status_code == 202
    quota = sender.put("t4", 0, BODY)
    assert quota.status_code == 429
    assert int(quota.headers["retry-after"]) > 0
    assert len(tight.objects(f"parts/{sender.secret.project_id}/")) == 5
    manifest = sender.http.post(sender.path("t", "finalize"), content=b" " * 20_001, headers=sender.headers)
    assert manifest.status_code == 413
    assert tight.sender().put("t", 0, BODY).status_code == 202, "another organisation is not concerned"


def test_a_replaced_part_takes_no_more_room_than_it_adds(tight: World):
    """Guards the mending of a full tick: the bytes that go make room for those that come."""
    sender = tight.sender()
    parts = [bytes([one]) * 12_000 for one in range(3)]
    assert [sender.put("t", number, parts[number]).status_code for number in range(2)] == [202, 202]
    assert sender.put("t", 2, parts[2]).status_code == 429, "30,000 bytes may be open"
    assert sender.put("t", 1, parts[2], If_Match=f'"{sha256(parts[1])}"').status_code == 202
    assert sender.put("t", 1, bytes(20_000), If_Match=f'"{sha256(parts[2])}"').status_code == 429


def test_a_body_that_does_not_come_is_408_and_stores_nothing(tight: World):
    sender = tight.sender()
    line = _raw(tight, sender, len(BODY), BODY[:100])
    assert b" 408 " in line.recv(65536).split(b"\r\n", 1)[0]
    line.close()
    assert tight.objects(f"parts/{sender.secret.project_id}/") == []


def test_abandoned_uploads_are_forgotten_and_their_objects_too(tight: World, spark: Any):
    sender, fresh = tight.sender(), tight.sender()
    draft = sender.put_all(sender.draft(BODY))
    fresh.put_all(fresh.draft(BODY))
    orphan = f"parts/{sender.secret.project_id}/{draft.tick_id}/000009-orphan.parquet"
    tight.s3.put_object(Bucket=tight.settings.ticks_bucket, Key=orphan, Body=b"x")
    tight.ask("UPDATE ticks.tick SET updated_at = now() - interval '2 days' WHERE tick_id = %s", draft.tick_id)
    with tight.committer(spark) as committer:
        committer._plant = replace(committer._plant, limits=Limits(upload_days=1.0))
        assert committer.expire_uploads() == 1
    assert tight.store.find(sender.secret.project_id, draft.tick_id) is None
    assert tight.objects(f"parts/{sender.secret.project_id}/") == []
    assert len(tight.objects(f"parts/{fresh.secret.project_id}/")) == 1


class _Ahead(SystemClock):
    """The clock of a machine that is a month ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(days=30)


def test_a_replica_whose_clock_runs_ahead_forgets_no_upload(tight: World, spark: Any):
    sender = tight.sender()
    draft = sender.put_all(sender.draft(BODY))
    with tight.committer(spark, clock=_Ahead()) as committer:
        committer.expire_uploads()
    assert sender.get(draft.tick_id).status_code == 200
    assert len(tight.objects(f"parts/{sender.secret.project_id}/")) == 1


def test_an_upload_that_is_begun_anew_while_it_is_forgotten_keeps_its_new_objects(tight: World, spark: Any):
    """Guards a part that is recorded: without its object no finalize could ever succeed, and no PUT would mend it."""
    sender = tight.sender()
    old = sender.put_all(sender.draft(BODY))
    tight.ask("UPDATE ticks.tick SET updated_at = now() - interval '30 days' WHERE tick_id = %s", old.tick_id)
    with tight.committer(spark) as committer:
        real = committer._plant.store.expire

        def forget_then_begin_anew(**more: Any) -> list[tuple[str, str]]:
            gone = real(**more)
            assert sender.put(old.tick_id, 0, OTHER).status_code == 202
            key = sender.world.ask("SELECT object_key FROM ticks.part WHERE tick_id = %s", old.tick_id)[0][0]
            assert key in tight.objects()
            return gone

        committer._plant.store.expire = forget_then_begin_anew  # type: ignore[method-assign]
        committer._plant.parts.sweep = partial(_sweep_until_tomorrow, committer._plant.parts.sweep)  # type: ignore[method-assign]
        committer.expire_uploads()
    assert sender.get(old.tick_id).json()["parts_received"]["0"]["sha256"] == sha256(OTHER)
    assert len(tight.objects(f"parts/{sender.secret.project_id}/{old.tick_id}/")) == 1


def _sweep_until_tomorrow(sweep: Any, *names: str, keep: Any, before: datetime) -> int:
    """As if S3's clock were behind: everything looks old."""
    swept: int = sweep(*names, keep=keep, before=before + timedelta(days=1))
    return swept


def test_too_many_requests_at_once_are_429(stack: Any):
    with open_world(stack, ticks_requests_per_second=0.02) as small, serving(small) as url:
        small.url = url
        sender, other = small.sender(), small.sender()
        address = f"{url}/v1/projects/{sender.secret.project_id}/status"
        first, second = (sender.http.get(address, headers=sender.headers) for _ in range(2))
        assert (first.status_code, second.status_code) == (200, 429)
        assert int(second.headers["retry-after"]) >= 1
        mine = f"{url}/v1/projects/{other.secret.project_id}/status"
        assert other.http.get(mine, headers=other.headers).status_code == 200


def test_expiry_counts_from_the_last_touch(world: World, sender: Sender):
    tick = new_tick_id()
    sender.put(tick, 0, BODY)
    expires = datetime.fromisoformat(sender.get(tick).json()["expires_at"])
    assert timedelta(days=6) < expires - datetime.now(UTC) < timedelta(days=8)
