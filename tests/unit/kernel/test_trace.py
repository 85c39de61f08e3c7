"""Trace ids: they survive every hop, and a bad one never stops work."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel import trace

A = "0af7651916cd43dd8448eb211c80319c"


def test_a_new_trace_is_a_w3c_trace_id() -> None:
    assert trace.is_trace(trace.new_trace())
    assert trace.new_trace() != trace.new_trace()


def test_a_bound_trace_is_current_inside_the_block_only() -> None:
    """A trace that leaks out of its block would file the next tenant's lines under this one."""
    assert trace.current_trace() is None
    with trace.bind_trace(A):
        with trace.bind_trace() as inner:
            assert trace.current_trace() == inner != A
        assert trace.current_trace() == A
    assert trace.current_trace() is None


def test_a_trace_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), trace.bind_trace(A):
        raise RuntimeError
    assert trace.current_trace() is None


def test_a_malformed_trace_is_replaced_not_refused() -> None:
    with trace.bind_trace("not-a-trace") as bound:
        assert trace.is_trace(bound)


def test_threads_and_tasks_do_not_share_a_trace() -> None:
    async def one(trace_id: str) -> str | None:
        with trace.bind_trace(trace_id):
            await asyncio.sleep(0)
            return trace.current_trace()

    async def both() -> list[str | None]:
        return list(await asyncio.gather(one(A), one("1" * 32)))

    assert asyncio.run(both()) == [A, "1" * 32]
    with trace.bind_trace(A), ThreadPoolExecutor(1) as pool:
        assert pool.submit(trace.current_trace).result() is None


@given(st.from_regex(r"[0-9a-f]{32}", fullmatch=True).filter(lambda t: t.strip("0")))
def test_a_trace_survives_the_header(trace_id: str) -> None:
    """A trace that changes on a hop splits one story into two that nobody can join."""
    assert trace.parse_traceparent(trace.traceparent(trace_id)) == trace_id


@given(st.text(max_size=80))
def test_parsing_any_text_never_raises(text: str) -> None:
    parsed = trace.parse_traceparent(text)
    assert parsed is None or trace.is_trace(parsed)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        A,
        f"00-{A}-b7ad6b7169203331",
        f"00-{A.upper()}-b7ad6b7169203331-01",
        f"ff-{A}-b7ad6b7169203331-01",
        f"00-{A}-b7ad6b7169203331-01-extra",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{A}-{'0' * 16}-01",
        f"00-{A}-b7ad6b7169203331-01\nx",
    ],
)
def test_a_malformed_header_is_no_trace(header: str | None) -> None:
    assert trace.parse_traceparent(header) is None


def test_a_future_version_may_carry_more_fields() -> None:
    assert trace.parse_traceparent(f"01-{A}-b7ad6b7169203331-01-new") == A


def test_carriers_name_the_current_trace() -> None:
    with trace.bind_trace(A):
        assert trace.spark_tag() == f"lockstep-trace-{A}"
        assert trace.traceparent().startswith(f"00-{A}-")
    assert (trace.RUN_TAG, trace.MESSAGE_ATTRIBUTE) == ("lockstep/trace", "traceparent")
