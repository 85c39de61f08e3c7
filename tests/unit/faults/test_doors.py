"""The doors of the lab: every address that a worker is given can lead through one, Spark's and the vendor's too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lockstep.faults.lab import _through
from lockstep.faults.proxy import LOOPBACK, Dose, ProxyLoop, Toxic, ToxicProxy

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("address", "through"),
    [
        ("postgresql://user:word@127.0.0.1:5432/lockstep", "postgresql://user:word@127.0.0.1:7/lockstep"),
        ("http://127.0.0.1:9324", "http://127.0.0.1:7"),
        ("sc://127.0.0.1:15002", "sc://127.0.0.1:7"),
        ("http://127.0.0.1:8104/v/1001", "http://127.0.0.1:7/v/1001"),
    ],
)
def test_an_address_leads_through_its_door_and_keeps_the_rest(address: str, through: str):
    assert _through(address, 7) == through


@pytest.fixture
def door() -> Iterator[ToxicProxy]:
    """A door in front of a gRPC server, which is what Spark Connect is."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    with ProxyLoop() as loop:
        yield loop.open("spark", LOOPBACK, port)
    server.stop(None).wait()


@pytest.fixture
def ask(door: ToxicProxy) -> Iterator[Callable[[], int]]:
    """One call through the door, on a channel that stays open as a worker's does."""
    with grpc.insecure_channel(f"{LOOPBACK}:{door.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        yield lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True).status


@pytest.mark.parametrize("toxic", [Toxic.RESET, Toxic.BLACK_HOLE, Toxic.CUT, Toxic.LOSE_ANSWER])
def test_a_call_of_grpc_meets_the_toxic_and_the_same_channel_works_again(
    door: ToxicProxy, ask: Callable[[], int], toxic: Toxic
):
    assert ask() == SERVING
    door.dose = Dose(toxic)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        while not door.struck[toxic.value]:
            time.sleep(0.01)
        door.dose = None
        broken = answer.exception(timeout=20)
    assert broken is None or broken.code() is grpc.StatusCode.UNAVAILABLE  # grpc may have repeated it by itself
    assert ask() == SERVING


def test_latency_only_delays_a_call_of_grpc(door: ToxicProxy, ask: Callable[[], int]):
    door.dose = Dose(Toxic.LATENCY, 0.05)
    assert ask() == SERVING
    assert door.struck[Toxic.LATENCY.value] > 0
