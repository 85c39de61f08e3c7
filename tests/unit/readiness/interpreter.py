"""A small interpreter of the Amazon States Language: the states, paths and error handling that our machine uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lockstep.kernel.clock import FakeClock


class Ended(NamedTuple):
    """How an execution ended, and the states that it walked through."""

    status: str
    last: str
    path: list[str]


class Interpreter:
    """Runs a definition. Waits advance the fake clock; retries do not wait."""

    def __init__(self, machine: dict[str, Any], tasks: Mapping[str, Callable[[Any], Any]], clock: FakeClock) -> None:
        self._states = machine["States"]
        self._start = machine["StartAt"]
        self._tasks = tasks
        self._clock = clock
        self.on_wait: Callable[[str], None] = lambda state: None

    def run(self, data: dict[str, Any], most: int = 400) -> Ended:
        name, path = self._start, []
        for _ in range(most):
            path.append(name)
            state = self._states[name]
            if state["Type"] in ("Succeed", "Fail"):
                return Ended("SUCCEEDED" if state["Type"] == "Succeed" else "FAILED", name, path)
            data, name = self._step(name, state, data)
        raise AssertionError(f"no end after {most} states: {path[-20:]}")

    def _step(self, name: str, state: dict[str, Any], data: dict[str, Any]) -> tuple[dict[str, Any], str]:
        kind = state["Type"]
        if kind == "Choice":
            return data, self._choice(state, data)
        if kind == "Wait":
            self._clock.advance(_get(data, state["SecondsPath"]))
            self.on_wait(name)
            return data, state["Next"]
        try:
            result = self._attempts(state, data)
        except Exception as error:
            for catch in state.get("Catch", []):
                words = {"Error": type(error).__name__, "Cause": str(error)}
                return _put(data, catch["ResultPath"], words), catch["Next"]
            raise
        return _put(data, state.get("ResultPath", "$"), result), state["Next"]

    def _attempts(self, state: dict[str, Any], data: dict[str, Any]) -> Any:
        left = sum(retry["MaxAttempts"] for retry in state.get("Retry", []))
        while True:
            try:
                return self._work(state, data)
            except Exception as error:
                known = {name for retry in state.get("Retry", []) for name in retry["ErrorEquals"]}
                if left == 0 or type(error).__name__ not in known:
                    raise
                left -= 1

    def _work(self, state: dict[str, Any], data: dict[str, Any]) -> Any:
        if state["Type"] == "Pass":
            return copy.deepcopy(state["Result"]) if "Result" in state else _build(state["Parameters"], data)
        if state["Type"] == "Task":
            return self._tasks[state["Resource"]](_build(state["Parameters"], data))
        results = []
        for item in _get(data, state["ItemsPath"]):
            inner = _build(state["ItemSelector"], {**data, "$$item": item})
            (only,) = state["ItemProcessor"]["States"].values()
            results.append(self._attempts(only, inner))
        return results

    def _choice(self, state: dict[str, Any], data: dict[str, Any]) -> str:
        for choice in state["Choices"]:
            if _get(data, choice["Variable"]) == choice["StringEquals"]:
                return choice["Next"]
        return state["Default"]


def _build(template: Mapping[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return {
        key.removesuffix(".$"): _get(data, value) if key.endswith(".$") else copy.deepcopy(value)
        for key, value in template.items()
    }


def _get(data: Any, path: str) -> Any:
    if path == "$$.Map.Item.Value":
        return data["$$item"]
    for part in path.split(".")[1:]:
        data = data[part]
    return data


def _put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    return value if path == "$" else {**data, path.removeprefix("$."): value}
