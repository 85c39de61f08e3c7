"""Sensors, one module per pipeline: read hints, read the ledger, request runs. No business rule."""

import dagster as dg

IN_FLIGHT = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
"""A run in one of these may still do something: its lane is taken, and so is its share of the connections."""

EVERY_LOOP_SECONDS = 4
"""The interval of a sensor that should be asked whenever Dagster's daemon looks, which is every 5 s.

With 5 it is asked at every other look: the daemon compares with the moment at which the sensor began, which is a little
after its own look, so 5 s later it finds 4.9 s and leaves the sensor out. Ticks were measured 10 s apart.
"""
