"""The bad line: what it does to connections, and that it does the same for the same seed."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from stack.demo.lossy import Fate, LossyProxy, Plan, Weather

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            size = 0
            while line.strip():
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
                line = self.rfile.readline()
            body = self.rfile.read(size)
            self.server.seen.append(len(body))  # type: ignore[attr-defined]
            if len(body) == size:
                self.wfile.write(ANSWER)


class _Fixed(Weather):
    """Weather that is told."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(0)
        self._plans = list(plans)

    def next(self) -> Plan:
        return self._plans.pop(0)


@contextmanager
def _line(*plans: Plan) -> Iterator[tuple[LossyProxy, list[int]]]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        server.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with LossyProxy(server.server_address, _Fixed(*plans)) as line:  # type: ignore[arg-type]
            yield line, server.seen  # type: ignore[attr-defined]
        server.shutdown()


def test_a_connection_in_good_weather_carries_requests_both_ways():
    with _line(Plan(Fate.WHOLE, 100_000)) as (line, seen), httpx.Client(base_url=line.url, timeout=10) as http:
        assert [http.post("/", content=b"x" * 5000).text for _ in range(3)] == ["ok"] * 3
        assert seen == [5000] * 3
        assert line.damage == {}


def test_a_refused_connection_never_reaches_the_service():
    with _line(Plan(Fate.REFUSED, 0)) as (line, seen):
        with pytest.raises(httpx.TransportError):
            httpx.post(line.url, content=b"x", timeout=10)
        assert (seen, line.damage) == ([], {Fate.REFUSED: 1})


def test_a_cut_request_reaches_the_service_in_part():
    with _line(Plan(Fate.CUT_REQUEST, 1000)) as (line, seen):
        with pytest.raises(httpx.TransportError):
            httpx.post(line.url, content=b"x" * 200_000, timeout=10)
        assert 200_000 not in seen
        assert line.damage == {Fate.CUT_REQUEST: 1}


def test_a_lost_answer_leaves_the_work_done_and_the_client_in_doubt():
    """Guards the case that makes retries dangerous: the service has it, the client cannot know."""
    with _line(Plan(Fate.LOST_ANSWER, 100_000)) as (line, seen):
        with pytest.raises(httpx.TransportError):
            httpx.post(line.url, content=b"x" * 500, timeout=10)
        assert seen == [500]
        assert line.damage == {Fate.LOST_ANSWER: 1}


def test_no_connection_lives_for_ever():
    with _line(Plan(Fate.WHOLE, 10_000)) as (line, seen), httpx.Client(base_url=line.url, timeout=10) as http:
        assert http.post("/", content=b"x" * 5000).text == "ok"
        with pytest.raises(httpx.TransportError):
            http.post("/", content=b"x" * 8000)
        assert seen[0] == 5000
        assert line.damage == {Fate.WHOLE: 1}


def test_a_service_that_is_away_is_one_more_bad_moment():
    with LossyProxy(("127.0.0.1", 1), _Fixed(Plan(Fate.WHOLE, 1000))) as line, pytest.raises(httpx.TransportError):
        httpx.get(line.url, timeout=10)


def test_the_same_seed_is_the_same_weather():
    first, again = Weather(7, 0.5), Weather(7, 0.5)
    fates = [first.next() for _ in range(50)]
    assert fates == [again.next() for _ in range(50)]
    assert {plan.fate for plan in fates} == set(Fate)


def test_leaving_ends_every_connection():
    with _line(Plan(Fate.WHOLE, 100_000)) as (line, _):
        http = httpx.Client(base_url=line.url, timeout=10)
        assert http.post("/", content=b"x").text == "ok"
        address = line.url
    with pytest.raises(httpx.TransportError):
        http.post("/", content=b"x")
    with pytest.raises(httpx.TransportError):
        httpx.get(address, timeout=2)
    http.close()
