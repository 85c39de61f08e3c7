"""Rules of exports: what a request means, what may be reused, what follows a failure, whose turn it is.

Pure and total: no clock, no client, no database. Stores and workers carry the decisions out.
"""

from __future__ import annotations

import heapq
import itertools
import random as random_module
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lockstep.exports.model import (
    CachedFile,
    Candidate,
    ChunkRequest,
    Counts,
    Format,
    FormulaGuard,
    JobStatus,
    Limits,
    Place,
    Submission,
)
from lockstep.kernel import strict_json
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.retry import RetryPolicy
from lockstep.kernel.strict_json import printable

MOST_PROBLEMS_LISTED = 1000
MOST_REFUNDS = 3
LONGEST_MAX_AGE = 10 * 365 * 24 * 3600
LONGEST_URL = 2048

# A key becomes part of a path: ASCII only, so that no two keys look alike, and it starts with a letter or a digit,
# so that it is never `.`, `..` or an option of some command.
KEY_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_BLANKS = " \t\r\n"
_YEAR = r"(?:19|20)[0-9]{2}"
_LEAP = r"(?:19(?:0[48]|[2468][048]|[13579][26])|20(?:0[048]|[2468][048]|[13579][26]))"
# Every real day from 1900 to 2099 and nothing else, so that a schema can say what the calendar allows.
DATE_PATTERN = (
    rf"{_YEAR}(?:(?:0[13578]|1[02])(?:0[1-9]|[12][0-9]|3[01])"
    rf"|(?:0[469]|11)(?:0[1-9]|[12][0-9]|30)|02(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}0229"
)
JOB_ID_PATTERN = r"J[0-9]{8}_[0-9]{6,12}"
TENANT_PATTERN = r"[a-z][a-z0-9-]{0,31}"
IDEMPOTENCY_KEY_PATTERN = r"[\x21-\x7e]{1,255}"

_KEY = re.compile(KEY_PATTERN, re.ASCII)
_DATE = re.compile(DATE_PATTERN, re.ASCII)
_FIELDS = frozenset({"items", "output", "force", "maxAge", "webhook"})

CHUNK_POLICY = RetryPolicy(max_attempts=100, base_seconds=2.0, cap_seconds=120.0)


class Problem(NamedTuple):
    """One thing that is wrong with a request, and where."""

    pointer: str
    detail: str


class BadSubmission(InvalidInput):
    """A request that breaks rules; nothing was written. `found` has every place, up to a bound."""

    def __init__(self, found: Sequence[Problem], *, kind: str = "invalid-submission") -> None:
        self.found = tuple(found[:MOST_PROBLEMS_LISTED])
        self.count = len(found)
        self.kind = kind
        super().__init__(
            f"{len(found)} problem(s) in the request; no job was made.",
            next_step="correct the listed places and send it again.",
            problems=[f"{one.pointer}: {one.detail}" for one in self.found],
        )


class UnreadableBody(InvalidInput):
    """A body that is no JSON, or JSON that two readers could understand differently; nothing was written."""


# --- what a request means -----------------------------------------------------------------------------------------


def read_json(raw: bytes | str) -> object:
    """The value of a body, or `UnreadableBody`."""
    try:
        return strict_json.read(raw)
    except strict_json.Unreadable as reason:
        raise UnreadableBody(f"the body is refused: it {reason}.") from None


def parse_submission(body: object, limits: Limits) -> Submission:
    """Read a request, or raise `BadSubmission` that lists every bad place."""
    if not isinstance(body, dict):
        raise BadSubmission([Problem("#", "the body must be a JSON object")])
    problems = [Problem(f"#/{_escape(name)}", "unknown field") for name in sorted(set(body) - _FIELDS)]
    chunks, duplicates = _items(body.get("items"), problems)
    form, guard = _output(body.get("output"), problems)
    force = _boolean(body, "force", problems)
    max_age = _max_age(body.get("maxAge"), problems)
    url = _webhook(body.get("webhook"), problems, private=limits.private_webhooks)
    if problems:
        raise BadSubmission(problems)
    if len(chunks) > limits.max_chunks:
        words = f"{len(chunks)} chunks are more than the {limits.max_chunks} that one job may have"
        raise BadSubmission([Problem("#/items", words)], kind="too-many-chunks")
    return Submission(tuple(chunks), duplicates, form, guard, force, max_age, url)


def _items(items: object, problems: list[Problem]) -> tuple[list[ChunkRequest], int]:
    if not isinstance(items, list) or not items:
        problems.append(Problem("#/items", "must be a non-empty list"))
        return [], 0
    wanted: dict[tuple[str, date], None] = {}
    asked = 0
    for index, item in enumerate(items):
        where = f"#/items/{index}"
        if not isinstance(item, dict):
            problems.append(Problem(where, "must be an object with key and effectiveDates"))
            continue
        problems += [
            Problem(f"{where}/{_escape(n)}", "unknown field") for n in sorted(set(item) - {"key", "effectiveDates"})
        ]
        key = _key(item.get("key"), f"{where}/key", problems)
        days = _dates(item.get("effectiveDates"), f"{where}/effectiveDates", problems)
        asked += len(days)
        if key is not None:
            wanted.update(((key, day), None) for day in days)
    ordered = sorted(wanted)
    return [ChunkRequest(key, day) for key, day in ordered], asked - len(ordered)


def _key(value: object, where: str, problems: list[Problem]) -> str | None:
    key = value.strip(_BLANKS) if isinstance(value, str) else None
    if key is not None and _KEY.fullmatch(key):
        return key
    # The value is not repeated: it may be megabytes, or not printable.
    words = "must be 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or a digit"
    problems.append(Problem(where, words if isinstance(value, str) else "must be text"))
    return None


def _dates(value: object, where: str, problems: list[Problem]) -> list[date]:
    if not isinstance(value, list) or not value:
        problems.append(Problem(where, "must be a non-empty list"))
        return []
    days = []
    for index, text in enumerate(value):
        if isinstance(text, str) and _DATE.fullmatch(text):
            days.append(date(int(text[:4]), int(text[4:6]), int(text[6:])))
        else:
            problems.append(Problem(f"{where}/{index}", "must be a calendar date yyyyMMdd from 1900 to 2099"))
    return days


def _output(value: object, problems: list[Problem]) -> tuple[Format, FormulaGuard]:
    if value is None:
        return Format.CSV, FormulaGuard.NONE
    if not isinstance(value, dict):
        problems.append(Problem("#/output", "must be an object"))
        return Format.CSV, FormulaGuard.NONE
    problems += [
        Problem(f"#/output/{_escape(n)}", "unknown field") for n in sorted(set(value) - {"format", "formulaGuard"})
    ]
    form = _choice(Format, value.get("format", "CSV"), "#/output/format", problems) or Format.CSV
    guard = _choice(FormulaGuard, value.get("formulaGuard", "none"), "#/output/formulaGuard", problems)
    if guard is FormulaGuard.QUOTE and form not in (Format.CSV, Format.CSV_GZ):
        problems.append(Problem("#/output/formulaGuard", "quote applies to CSV only"))
    return form, guard or FormulaGuard.NONE


def _choice(kind: Any, value: object, where: str, problems: list[Problem]) -> Any:
    known = {member.value for member in kind}
    text = value.lower() if isinstance(value, str) and value.isascii() else None
    if text in known:
        return kind(text)
    problems.append(Problem(where, f"must be one of {', '.join(sorted(known))}"))
    return None


def _boolean(body: Mapping[str, object], name: str, problems: list[Problem]) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        problems.append(Problem(f"#/{name}", "must be true or false"))
        return False
    return value


def _max_age(value: object, problems: list[Problem]) -> timedelta | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number: 60.0 is 60
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LONGEST_MAX_AGE:
        problems.append(Problem("#/maxAge", f"must be whole seconds from 0 to {LONGEST_MAX_AGE}"))
        return None
    return timedelta(seconds=value)


def _webhook(value: object, problems: list[Problem], *, private: bool) -> str | None:
    if value is None:
        return None
    url = value.get("url") if isinstance(value, dict) and set(value) == {"url"} else None
    if not isinstance(url, str):
        problems.append(Problem("#/webhook", "must be an object with url"))
        return None
    words = webhook_problem(url, private=private)
    if words:
        problems.append(Problem("#/webhook/url", words))
        return None
    return url


def webhook_problem(url: str, *, private: bool) -> str | None:
    """Why an address may not be called, as far as its spelling tells; the name is resolved at delivery."""
    if len(url) > LONGEST_URL or not url.isascii() or not url.isprintable() or " " in url:
        return f"must be a printable ASCII address of at most {LONGEST_URL} characters"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "is no address"
    if parts.scheme != "https" and not (private and parts.scheme == "http"):
        return "must start with https://"
    if not host or "@" in parts.netloc or parts.fragment or port == 0:
        return "must have a host, and no credentials and no fragment"
    if private:
        return None
    return None if _public_name(host) else "must be a public host"


def _public_name(host: str) -> bool:
    try:
        return ip_address(host).is_global
    except ValueError:
        pass
    # Numbers in other spellings (0x7f.1, 2130706433) are addresses too: a public name ends in letters.
    last = host.rstrip(".").rpartition(".")[2]
    return "." in host.strip(".") and not last.isdigit() and not last.lower().startswith("0x")


def _escape(name: object) -> str:
    return printable(str(name)).replace("~", "~0").replace("/", "~1")


# --- names ----------------------------------------------------------------------------------------------------------


def job_id(day: date, number: int) -> str:
    """`J20260102_000123`: the UTC day and the job's number, read together so that midnight cannot split them."""
    return f"J{day:%Y%m%d}_{number:06d}"


def tenant_path(place: Place, tenant: str, default: str) -> str:
    """The folder of a tenant's files. A tenant's name starts with a letter, a year does not: they cannot meet."""
    base = place.base_path.strip("/")
    return base if tenant == default else f"{base}/{tenant}"


def object_key(folder: str, key: str, day: date, form: Format, guard: FormulaGuard) -> str:
    """`<basePath>/YYYY/MM/DD/<KEY>_<YYYYMMDD>.csv`. Different files never share a path."""
    variant = ".guarded" if guard is FormulaGuard.QUOTE else ""
    return f"{folder}/{day:%Y/%m/%d}/{key}_{day:%Y%m%d}{variant}.{form.value}"


def file_id(tenant: str, key: str, day: date, form: Format, guard: FormulaGuard) -> str:
    """The identity of a file: everything its bytes depend on except the data and the function's version."""
    return f"{tenant}/{form.value}/{guard.value}/{day:%Y%m%d}/{key}"


# --- reuse ----------------------------------------------------------------------------------------------------------


def reuse_allowed(day: date, *, as_of: datetime, window_days: int, force: bool = False) -> bool:
    """Whether a chunk may reuse a file at all: decided once per job, in UTC, before any file is looked at."""
    return not force and day < as_of.astimezone(UTC).date() - timedelta(days=window_days)


def may_reuse(
    found: CachedFile, *, as_of: datetime, window_days: int, max_age: timedelta | None, schema_version: str
) -> bool:
    """Whether this file may be handed out: it was made when its data was final, and nothing changed since.

    A file made earlier than the window after its date may hold figures that moved later, so it never counts.
    """
    final_from = datetime(
        found.effective_date.year, found.effective_date.month, found.effective_date.day, tzinfo=UTC
    ) + timedelta(days=window_days)
    young_enough = max_age is None or found.last_generated_at >= as_of - max_age
    return found.last_generated_at >= final_from and young_enough and found.schema_version == schema_version


# --- states ---------------------------------------------------------------------------------------------------------


def job_status(counts: Counts, *, cancel_requested: bool, started: bool) -> JobStatus:
    """The state that follows from the counters. Terminal only when no worker holds any chunk of the job."""
    if counts.done == counts.total:
        return JobStatus.COMPLETED
    if cancel_requested and counts.running == 0:
        return JobStatus.CANCELLED
    if counts.pending == 0 and counts.running == 0:
        return JobStatus.FAILED
    return JobStatus.IN_PROGRESS if started or counts.running or counts.done or counts.failed else JobStatus.SUBMITTED


def percent(counts: Counts) -> int:
    """Chunks that are done, of a hundred. It never goes back: a done chunk stays done."""
    return counts.done * 100 // counts.total


def eta_seconds(counts: Counts, *, started_at: datetime | None, updated_at: datetime) -> int | None:
    """Seconds that the rest may take at the speed so far, counted from the last change; None before any speed."""
    finished = counts.done + counts.failed
    if started_at is None or finished == 0:
        return None
    left = counts.total - finished
    return round(max(0.0, (updated_at - started_at).total_seconds()) / finished * left)


# --- what follows a failure -----------------------------------------------------------------------------------------


class Retry(NamedTuple):
    """Back to the queue after so many seconds. `refund`: the attempt does not count."""

    seconds: float
    refund: bool


class GiveUp(NamedTuple):
    """The chunk failed for good."""


def after_failure(
    *,
    attempts: int,
    max_attempts: int,
    terminal: bool = False,
    infrastructure: bool = False,
    suspect_refunds: int = 0,
    cancelled: bool = False,
    random: random_module.Random | None = None,
) -> Retry | GiveUp:
    """What happens to a chunk whose build did not end well.

    An outage of a part says nothing about the chunk: the attempt is given back, and the breaker keeps others away.
    Unless the chunk itself may be the outage, because its statement ends the session it runs in: then
    `suspect_refunds` tells how often it got its attempt back before, and from `MOST_REFUNDS` on it pays.
    """
    if cancelled:
        return Retry(0.0, refund=True)
    if infrastructure and suspect_refunds < MOST_REFUNDS:
        return Retry(CHUNK_POLICY.delay(1, random=random), refund=True)
    if terminal or attempts >= max_attempts:
        return GiveUp()
    return Retry(CHUNK_POLICY.delay(max(1, attempts), random=random), refund=False)


def breaker_pause(failures: int) -> float:
    """Seconds for which nobody tries a part that failed so many times in a row."""
    return min(60.0, 2.0 * 2.0 ** min(failures - 1, 10))


# --- whose turn it is -----------------------------------------------------------------------------------------------


def fair_order(
    candidates: Iterable[Candidate], *, limit: int, busy_clients: Mapping[str, int], busy_jobs: Mapping[str, int]
) -> list[Candidate]:
    """Choose up to `limit` chunks so that no client, and no job of a client, waits behind another's thousands.

    Always the next chunk of the client with the fewest chunks in hand, from its job with the fewest; ties go to
    the order given. One chunk per file: the others are served by the same build.
    """
    lanes: dict[str, dict[str, list[Candidate]]] = {}
    seen: set[str] = set()
    for one in candidates:
        if one.file_id not in seen:
            seen.add(one.file_id)
            lanes.setdefault(one.client_id, {}).setdefault(one.job_id, []).append(one)
    tie = itertools.count()
    clients = [(busy_clients.get(client, 0), next(tie), client) for client in lanes]
    heapq.heapify(clients)
    jobs = {
        client: [(busy_jobs.get(job, 0), next(tie), job, iter(chunks)) for job, chunks in queues.items()]
        for client, queues in lanes.items()
    }
    for queue in jobs.values():
        heapq.heapify(queue)
    return _draw(clients, jobs, limit)


def _draw(clients: list[Any], jobs: dict[str, list[Any]], limit: int) -> list[Candidate]:
    chosen: list[Candidate] = []
    while clients and len(chosen) < limit:
        load, tie, client = heapq.heappop(clients)
        queue = jobs[client]
        while queue:
            job_load, job_tie, job, chunks = heapq.heappop(queue)
            if (chunk := next(chunks, None)) is not None:
                chosen.append(chunk)
                heapq.heappush(queue, (job_load + 1, job_tie, job, chunks))
                heapq.heappush(clients, (load + 1, tie, client))
                break
    return chosen
