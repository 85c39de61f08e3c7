"""Triggers behind HTTP: any address, Airflow, Databricks. The client decides which addresses may be called.

What belongs here: each service's wire format and what its states mean. What does not: retries, which the ledger owns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import httpx

from lockstep.readiness.model import Category, Polled, PollOutcome, Started, StartFailed, StartUnknown
from lockstep.readiness.safety import Forbidden, reveal
from lockstep.readiness.triggers.base import Job, StartAnswer

# A gateway that gave up waiting does not know whether the request went through.
_UNKNOWN: Final = frozenset({502, 504})
_HEALING: Final = frozenset({408, 425, 429, 500, 503})


class _Web:
    """What the three share: one bounded call, secrets put into headers at the last moment."""

    def __init__(self, client: httpx.Client, secrets: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._secrets = dict(secrets or {})

    def _call(self, job: Job, method: str, url: str, body: Any = None, **headers: str) -> httpx.Response:
        own = reveal(job.options.get("headers") or {}, self._secrets)
        content = body if isinstance(body, str) else json.dumps(body)
        sent = None if body is None else content.encode()
        kind = {} if body is None or isinstance(body, str) else {"Content-Type": "application/json"}
        return self._client.request(
            method, url, content=sent, headers={**kind, **own, **headers}, timeout=float(job.timeout)
        )

    def _start(self, job: Job, method: str, url: str, body: Any, **headers: str) -> httpx.Response | StartAnswer:
        """The response, or the answer if there is none or it is a refusal."""
        try:
            response = self._call(job, method, url, body, **headers)
        except Forbidden as error:
            return StartFailed(job.token, Category.PERMANENT, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            return StartFailed(job.token, Category.TRANSIENT, f"not reached: {type(error).__name__}")
        except httpx.HTTPError as error:
            return StartUnknown(job.token, f"sent, no answer: {type(error).__name__}")
        return _refusal(job, response) or response


def _refusal(job: Job, response: httpx.Response) -> StartAnswer | None:
    status = response.status_code
    if 200 <= status < 300:
        return None
    words = f"status {status}: {response.text[:200]}"
    if status in _UNKNOWN:
        return StartUnknown(job.token, words)
    return StartFailed(job.token, Category.TRANSIENT if status in _HEALING else Category.PERMANENT, words)


class HttpTrigger(_Web):
    """A request to any address. The token travels as `Idempotency-Key`.

    With `completion: response` a good answer is the job's end; with `callback` the job reports by itself.
    """

    def start(self, job: Job) -> StartAnswer:
        """Send the request."""
        options = job.options
        headers = {"Idempotency-Key": job.token}
        answer = self._start(job, options["method"], options["url"], options["body"] or "", **headers)
        if not isinstance(answer, httpx.Response):
            return answer
        return Started(job.token, {"status": answer.status_code}, finished=options["completion"] == "response")

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """Only the job itself knows; until it reports it counts as running."""
        return Polled(job.token, PollOutcome.RUNNING)

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """There is no way to ask, so nobody can say that it stopped."""
        return False


class AirflowTrigger(_Web):
    """A DAG run whose id is the token."""

    def start(self, job: Job) -> StartAnswer:
        """Create the DAG run; one that exists under our id is ours."""
        body = {"dag_run_id": job.token, "conf": job.options["body"]}
        if job.options["api"] == "v2":
            body["logical_date"] = None
        answer = self._start(job, "POST", f"{self._dag(job)}/dagRuns", body)
        if isinstance(answer, StartFailed) and answer.message.startswith("status 409"):
            return Started(job.token, {"airflow_dag_run_id": job.token})
        if not isinstance(answer, httpx.Response):
            return answer
        run_id = answer.json().get("dag_run_id", job.token)
        return Started(job.token, {"airflow_dag_run_id": run_id, "airflow_dag_id": job.options["dag_id"]})

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The DAG run's state."""
        response = self._call(job, "GET", self._run(job, handle))
        response.raise_for_status()
        state = response.json().get("state")
        outcomes = {
            "queued": PollOutcome.RUNNING,
            "running": PollOutcome.RUNNING,
            "success": PollOutcome.SUCCEEDED,
            "failed": PollOutcome.FAILED,
        }
        return Polled(job.token, outcomes.get(state, PollOutcome.UNKNOWN), Category.TRANSIENT, f"Airflow says {state}")

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Mark the run failed, which is how Airflow stops one; believe it when it says so."""
        self._call(job, "PATCH", self._run(job, handle), {"state": "failed"}).raise_for_status()
        return self.status(job, handle).outcome in (PollOutcome.FAILED, PollOutcome.SUCCEEDED)

    def _dag(self, job: Job) -> str:
        dag = quote(job.options["dag_id"], safe="")
        return f"{job.options['url'].rstrip('/')}/api/{job.options['api']}/dags/{dag}"

    def _run(self, job: Job, handle: Mapping[str, Any]) -> str:
        return f"{self._dag(job)}/dagRuns/{quote(str(handle.get('airflow_dag_run_id', job.token)), safe='')}"


class DatabricksTrigger(_Web):
    """A run of a job (Jobs API 2.1), made once per `idempotency_token`."""

    def start(self, job: Job) -> StartAnswer:
        """Run now. Databricks itself returns the existing run for a token it knows."""
        body = {
            "job_id": job.options["job_id"],
            "idempotency_token": job.token,
            "job_parameters": job.options["arguments"],
        }
        answer = self._start(job, "POST", f"{self._base(job)}/run-now", body)
        if not isinstance(answer, httpx.Response):
            return answer
        return Started(job.token, {"databricks_run_id": answer.json()["run_id"]})

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """Life cycle first; the result counts only once it is over."""
        response = self._call(job, "GET", f"{self._base(job)}/runs/get?run_id={handle['databricks_run_id']}")
        response.raise_for_status()
        state = response.json().get("state", {})
        life, result = state.get("life_cycle_state"), state.get("result_state")
        words = f"Databricks says {life} {result or ''}: {state.get('state_message', '')}"[:300]
        if life in ("PENDING", "RUNNING", "TERMINATING", "BLOCKED", "WAITING_FOR_RETRY", "QUEUED"):
            return Polled(job.token, PollOutcome.RUNNING)
        if life == "SKIPPED":
            return Polled(job.token, PollOutcome.FAILED, Category.PERMANENT, words)
        if life == "INTERNAL_ERROR":
            return Polled(job.token, PollOutcome.FAILED, Category.TRANSIENT, words)
        outcome, category = (
            _DATABRICKS.get(result, (PollOutcome.UNKNOWN, None))
            if life == "TERMINATED"
            else (
                PollOutcome.UNKNOWN,
                None,
            )
        )
        return Polled(job.token, outcome, category, words)

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Cancel, then look."""
        body = {"run_id": handle["databricks_run_id"]}
        self._call(job, "POST", f"{self._base(job)}/runs/cancel", body).raise_for_status()
        return self.status(job, handle).outcome not in (PollOutcome.RUNNING, PollOutcome.UNKNOWN)

    def _base(self, job: Job) -> str:
        return f"{job.options['workspace_url'].rstrip('/')}/api/2.1/jobs"


_DATABRICKS: Final[dict[str | None, tuple[PollOutcome, Category | None]]] = {
    "SUCCESS": (PollOutcome.SUCCEEDED, None),
    "FAILED": (PollOutcome.FAILED, Category.TRANSIENT),
    "TIMEDOUT": (PollOutcome.FAILED, Category.TIMEOUT),
    "CANCELED": (PollOutcome.CANCELLED, None),
    "MAXIMUM_CONCURRENT_RUNS_REACHED": (PollOutcome.FAILED, Category.TRANSIENT),
}
