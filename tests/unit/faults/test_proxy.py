"""The proxy does to a connection what it says, and nothing when nothing is set."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lockstep.faults.proxy import Dose, ProxyLoop, Toxic, ToxicProxy


class _Echo(socketserver.ThreadingTCPServer):
    """Answers every line, and remembers what it was asked: the deed behind an answer."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with suppress(ConnectionError):  # the proxy resets connections: that is what it is for
            for line in self.rfile:
                self.server.heard.append(line)  # type: ignore[attr-defined]
                self.wfile.write(b"answer to " + line)


@pytest.fixture
def echo() -> Iterator[_Echo]:
    with _Echo() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(echo: _Echo) -> Iterator[ToxicProxy]:
    with ProxyLoop() as loop:
        yield loop.open("echo", *echo.server_address)


def _ask(proxy: ToxicProxy, text: bytes = b"hello\n", *, timeout: float = 5.0) -> bytes:
    """One question; what came back until the end or the time, or the error."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout) as connection:
        connection.sendall(text)
        found = b""
        while not found.endswith(b"\n"):
            piece = connection.recv(1000)
            if not piece:
                break
            found += piece
    return found


def _wait_until_heard(echo: _Echo) -> None:
    deadline = time.monotonic() + 5
    while not echo.heard and time.monotonic() < deadline:
        time.sleep(0.01)


def test_without_a_toxic_everything_passes(proxy: ToxicProxy):
    assert _ask(proxy) == b"answer to hello\n"
    assert not proxy.struck


def test_latency_delays_and_loses_nothing(proxy: ToxicProxy):
    proxy.dose = Dose(Toxic.LATENCY, 0.1)
    assert _ask(proxy) == b"answer to hello\n"
    assert proxy.struck["latency"] == 2


def test_a_reset_refuses_new_connections(proxy: ToxicProxy):
    proxy.dose = Dose(Toxic.RESET)
    with pytest.raises(ConnectionError):
        _ask(proxy)


def test_a_lost_answer_means_that_the_deed_was_done(proxy: ToxicProxy, echo: _Echo):
    proxy.dose = Dose(Toxic.LOSE_ANSWER)
    with pytest.raises(ConnectionError):
        _ask(proxy)
    _wait_until_heard(echo)
    assert echo.heard == [b"hello\n"]


def test_a_black_hole_answers_nothing_and_does_nothing(proxy: ToxicProxy, echo: _Echo):
    proxy.dose = Dose(Toxic.BLACK_HOLE)
    with pytest.raises(TimeoutError):
        _ask(proxy, timeout=0.3)
    assert echo.heard == []


def test_a_cut_lets_only_the_first_bytes_through(proxy: ToxicProxy, echo: _Echo):
    proxy.dose = Dose(Toxic.CUT, 3)
    with pytest.raises(ConnectionError):
        _ask(proxy)
    assert echo.heard in ([], [b"hel"])


def test_a_lifted_toxic_leaves_no_trace(proxy: ToxicProxy):
    proxy.dose = Dose(Toxic.RESET)
    with pytest.raises(ConnectionError):
        _ask(proxy)
    proxy.dose = None
    assert _ask(proxy) == b"answer to hello\n"


def test_a_cut_that_no_piece_reaches_is_no_fault(proxy: ToxicProxy):
    """Guards the count: what passed whole was not damaged, and must not be reported as a fault."""
    proxy.dose = Dose(Toxic.CUT, 1000)
    assert _ask(proxy) == b"answer to hello\n"
    assert not proxy.struck


def test_doors_that_close_on_an_open_connection_say_nothing(echo: _Echo, caplog: pytest.LogCaptureFixture):
    with ProxyLoop() as loop:
        door = loop.open("echo", *echo.server_address)
        connection = socket.create_connection(("127.0.0.1", door.port))
        connection.sendall(b"hello\n")
        assert connection.recv(100)
    connection.close()
    assert caplog.records == []
