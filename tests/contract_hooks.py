"""What schemathesis must know beyond the contracts, for its own command (schemathesis.toml) and for our tests.

What belongs here: rules about several requests, which no schema of one request can say.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import schemathesis
from schemathesis.generation.meta import TestPhase

from lockstep.exports import rules


def fresh_key(case: Any) -> None:
    """A good key becomes one of its own: a key that comes back with another body is rightly refused with 422."""
    key = (case.headers or {}).get("Idempotency-Key")
    if isinstance(key, str) and re.fullmatch(rules.IDEMPOTENCY_KEY_PATTERN, key):
        case.headers["Idempotency-Key"] = str(uuid.uuid4())


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Called before every request that is drawn at random; those of the coverage phase are written out one by one."""
    if case.meta is None or case.meta.phase.name is not TestPhase.COVERAGE:
        fresh_key(case)
