"""The run's Spark session as a Dagster resource, on top of dagster-pyspark.

What belongs here: opening, tagging and releasing the session. What does not: queries, addresses (lake.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

from lockstep.kernel import trace
from resources import classic_spark

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
    from pyspark.sql import SparkSession


class SparkResource(dg.ConfigurableResource):
    """A session opened at first use, tagged with the run's trace and released when the run ends.

    It holds a `LazyPySparkResource` instead of being one: importing dagster_pyspark imports pyspark, which
    every code reload and run would pay for. dagster-pyspark also never stops a session, and a session that is
    not released stays on the Spark Connect server until the server's own timeout.
    """

    mode: str = Field(default="connect", description="`connect`: a Spark Connect server. `classic`: a JVM in the run.")
    remote: str | None = Field(default=None, description="Address of the Spark Connect server.")
    spark_config: dict[str, Any] = Field(default_factory=dict, description="Further Spark settings, which win.")
    _session: LazyPySparkResource | None = PrivateAttr(default=None)
    _opened_here: bool = PrivateAttr(default=False)
    _trace: str | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Remember the trace of the run; nothing is opened yet."""
        self._trace = _trace_of(context.run)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Release what this resource opened. A session that existed before belongs to someone else."""
        if self._session is not None and self._opened_here:
            self._session.spark_session.stop()
        self._session = None

    @property
    def spark_session(self) -> SparkSession:
        """The session, opened now if this is the first use."""
        if self._session is None:
            self._session = self._open()
        session: SparkSession = self._session.spark_session
        return session

    def _open(self) -> LazyPySparkResource:
        from dagster_pyspark import LazyPySparkResource  # imports pyspark

        self._opened_here = not _session_exists()
        lazy = LazyPySparkResource(spark_config=self._complete_config())
        lazy.spark_session.addTag(trace.spark_tag(self._trace))
        return lazy

    def _complete_config(self) -> dict[str, Any]:
        if self.mode != "classic":
            return {"spark.remote": self.remote, **self.spark_config}
        classic_spark.prepare_java()
        return {**classic_spark.classic_config(), **self.spark_config}


def _session_exists() -> bool:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.getActiveSession() is not None
    except PySparkException:  # Spark Connect raises where classic Spark answers None
        return False


def _trace_of(run: dg.DagsterRun | None) -> str | None:
    """The trace that the sensor put on the run; else the run id, which has the same 128 bits."""
    if run is None:
        return None
    return run.tags.get(trace.RUN_TAG) or run.run_id.replace("-", "")
