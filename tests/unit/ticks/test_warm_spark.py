"""The warm Spark session: whatever keeps it from opening is a `Transient`, so that whoever asked tries again."""

from __future__ import annotations

import pytest
from pyspark.sql.connect.session import SparkSession as Remote

from lockstep.faults.proxy import LOOPBACK, ProxyLoop
from lockstep.kernel.errors import Transient
from resources.ticks import WarmSpark

NOBODY = 1  # a port that no part listens on


def test_a_server_that_does_not_listen_is_found_out_at_once():
    with pytest.raises(Transient, match="Spark does not answer"):
        WarmSpark(f"sc://{LOOPBACK}:{NOBODY}").session()


@pytest.mark.filterwarnings("ignore:.*RETRIES_EXCEEDED")
def test_a_server_that_listens_and_hangs_up_is_transient_too():
    """Guards a knock that is heard while the call after it is cut: the error of the wire ended the whole worker."""
    before = Remote._default_session
    with ProxyLoop() as loop:
        door = loop.open("spark", LOOPBACK, NOBODY)
        with pytest.raises(Transient, match="Spark does not answer"):
            WarmSpark(f"sc://{LOOPBACK}:{door.port}").session()
    assert Remote._default_session is before, "whoever asks PySpark for a session next would be given the dead one"
