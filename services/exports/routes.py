"""Routes of the exports service: read the request, ask the store, spell the answer.

What belongs here: HTTP. What does not: rules, SQL, and the words of the contract (contract.py).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

import anyio
from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response, Security
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi.security import APIKeyHeader
from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from starlette.convertors import Convertor, register_url_convertor

from lockstep.exports import rules
from lockstep.exports.dialect import CSV_DIALECT
from lockstep.exports.model import Chunk, ChunkRequest, ChunkStatus, Client, Format, Job, JobStatus
from lockstep.exports.store import IDEMPOTENCY_HOURS, Accepted, NotFound
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import Transient
from services.exports.budget import charge
from services.exports.contract import (
    EXAMPLE_ID,
    FORMULA_GUARDS,
    PROBLEM_TYPES,
    AcceptedView,
    ChunksView,
    ChunkView,
    FileView,
    JobsView,
    JobView,
    LimitsView,
    ManifestView,
    PlanView,
    ProblemTypeView,
    SecretView,
    problem,
    problems,
)
from services.openapi import header

MAX_PAGE = 1000
DOWNLOAD_SECONDS = 3600
POLL_SECONDS = 2
_SLOW_POLL_SECONDS = 10
LONGEST_WAIT_SECONDS = 20  # no longer than a request in progress gets when the service is stopped
_LOOK_AGAIN_SECONDS = 0.5
_WAIT = re.compile(r"\s*wait\s*=\s*\"?(\d{1,6})\"?\s*(;.*)?", re.ASCII | re.IGNORECASE)
_INSTANT = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]", re.ASCII)
_CURSOR = "^[0-9a-f]{16}$"
_JOB_ID = re.compile(rules.JOB_ID_PATTERN, re.ASCII)


class _Segment(Convertor[str]):
    """A path segment without a colon, so that `/jobs/X:cancel` is never taken for a job called `X:cancel`."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("segment", _Segment())

router = APIRouter()

_key_header = APIKeyHeader(
    name="X-Api-Key", auto_error=False, description="The key from `lockstep exports client add`."
)


def _client(request: Request, api_key: Annotated[str | None, Security(_key_header)]) -> Client:
    doors = request.app.state.doors
    if doors is None:
        raise Transient("no state database is known.", next_step="start the stack, or set LOCKSTEP_POSTGRES_DSN.")
    client: Client | None = doors.clients.authenticate(api_key)
    if client is None:
        raise problem(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            "Who are you?",
            "X-Api-Key is missing, wrong or revoked.",
            headers={"WWW-Authenticate": 'ApiKey realm="exports"'},
        )
    charge(request.scope, doors.budgets.spend(f"exports/{client.client_id}"))
    return client


def _spelled(value: Any) -> Any:
    """An instant is text: a bare number would be read as seconds since 1970, which no contract here says."""
    if isinstance(value, str) and not _INSTANT.match(value):
        raise ValueError("must be an RFC 3339 date-time")
    return value


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:  # the first or last hours of the calendar in another zone
        return datetime.min.replace(tzinfo=UTC) if moment.year == 1 else datetime.max.replace(tzinfo=UTC)


def _possible(job_id: str) -> str:
    """An id that no job can have is answered like one that no job has: clients look for 404, whatever they asked."""
    if not _JOB_ID.fullmatch(job_id):
        raise NotFound("there is no such job.")
    return job_id


Instant = Annotated[AwareDatetime, BeforeValidator(_spelled), AfterValidator(_in_utc)]
Caller = Annotated[Client, Depends(_client)]
JobId = Annotated[
    str,
    Path(alias="jobId", json_schema_extra={"pattern": f"^{rules.JOB_ID_PATTERN}$"}, examples=[EXAMPLE_ID]),
    AfterValidator(_possible),
]
Cursor = Annotated[str | None, Query(pattern=_CURSOR, description="`nextCursor` of the page before.")]
IfNoneMatch = Annotated[str | None, Header(alias="If-None-Match", pattern=r"^[\x20-\x7e]{0,200}$")]
Prefer = Annotated[
    str | None, Header(alias="Prefer", pattern=r"^[\x20-\x7e]{0,200}$", description="RFC 7240; others are ignored.")
]
PageSize = Annotated[int, Query(alias="pageSize", ge=1, le=MAX_PAGE)]

_JOB_LINK = {"jobId": "$response.body#/jobId"}
_LINKS = {
    "job": {"operationId": "getJob", "parameters": _JOB_LINK},
    "chunks": {"operationId": "listChunks", "parameters": _JOB_LINK},
    "manifest": {"operationId": "getManifest", "parameters": _JOB_LINK},
    "cancel": {"operationId": "cancelJob", "parameters": _JOB_LINK},
    "retry": {"operationId": "retryJob", "parameters": _JOB_LINK},
}
_RETRY_AFTER = {"Retry-After": header("Seconds to wait before the next poll.", "integer")}
_APPLIED = {"Preference-Applied": header("The preference of `Prefer` that was followed.")}
_JOB_HEADERS = {"ETag": header("Version of the job, for If-None-Match."), **_RETRY_AFTER}


@router.post(
    "/jobs",
    operation_id="submitJob",
    tags=["jobs"],
    summary="Submit an export job",
    status_code=HTTPStatus.ACCEPTED,
    response_model=AcceptedView,
    responses={
        **problems(400, 409, 413, 415),
        409: {**problems(409)[409], "headers": {"Retry-After": header("Seconds, if the key is in flight.", "integer")}},
        200: {"model": PlanView, "description": "`validateOnly=true`: what the job would do. Nothing was made."},
        202: {
            "description": "The job is recorded and will be worked on, whatever happens next.",
            "headers": {
                "Location": header("Where to poll."),
                "Idempotent-Replayed": header("`true` if this answer was given before."),
                **_APPLIED,
                **_RETRY_AFTER,
            },
            "links": _LINKS,
        },
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Submission"}}},
        }
    },
)
async def submit(
    request: Request,
    client: Caller,
    validate_only: Annotated[bool, Query(alias="validateOnly")] = False,
    idempotency_key: Annotated[
        str | None, Header(alias="Idempotency-Key", pattern=f"^{rules.IDEMPOTENCY_KEY_PATTERN}$")
    ] = None,
    prefer: Prefer = None,
) -> Response:
    """Record the job, its chunks and its messages in one transaction, then answer."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "Not JSON.", "Send application/json."
        )
    raw = await request.body()
    answer = await to_thread.run_sync(_submit, request, client, raw, validate_only, idempotency_key)
    if answer.status_code == HTTPStatus.ACCEPTED and "respond-async" in _preferences(prefer):
        answer.headers["Preference-Applied"] = "respond-async"  # it never is anything else, but the client asked
    return answer


def _submit(request: Request, client: Client, raw: bytes, validate_only: bool, idempotency_key: str | None) -> Response:
    doors = request.app.state.doors
    body = rules.read_json(raw)
    submission = rules.parse_submission(body, doors.limits)
    if validate_only:
        plan = doors.jobs.plan(client, submission)
        view = PlanView(
            valid=True,
            total=plan.total,
            duplicates_removed=plan.duplicates_removed,
            reusable=plan.reusable,
            to_generate=plan.to_generate,
        )
        return JSONResponse(view.model_dump(by_alias=True))
    accepted: Accepted = doors.jobs.submit(client, submission, body, idempotency_key=idempotency_key)
    crash_point("exports.api.before_answer")
    headers = {"Location": f"/jobs/{accepted.job_id}", "Retry-After": str(POLL_SECONDS)}
    if accepted.replayed:
        headers["Idempotent-Replayed"] = "true"
    return JSONResponse(accepted.answer, status_code=HTTPStatus.ACCEPTED, headers=headers)


@router.get(
    "/jobs",
    operation_id="listJobs",
    tags=["jobs"],
    summary="Your jobs, the newest first",
    response_model=JobsView,
    responses=problems(),
)
def list_jobs(
    request: Request,
    client: Caller,
    status: Annotated[JobStatus | None, Query()] = None,
    created_after: Annotated[Instant | None, Query(alias="createdAfter")] = None,
    created_before: Annotated[Instant | None, Query(alias="createdBefore")] = None,
    page_size: PageSize = 50,
    cursor: Cursor = None,
) -> Response:
    """A cursor stays valid while new jobs arrive: no job is shown twice or skipped."""
    found = request.app.state.doors.jobs.page(
        client,
        before=min(int(cursor, 16), 2**62) if cursor else 2**62,
        limit=page_size + 1,
        status=status,
        created_after=created_after,
        created_before=created_before,
    )
    more = len(found) > page_size
    shown = found[:page_size]
    view = JobsView(jobs=[_job_view(job) for job in shown], next_cursor=f"{shown[-1].number:016x}" if more else None)
    return JSONResponse(view.model_dump(by_alias=True))


@router.get(
    "/jobs/{jobId:segment}",
    operation_id="getJob",
    tags=["jobs"],
    summary="One job",
    response_model=JobView,
    responses={
        **problems(404),
        200: {"headers": {**_JOB_HEADERS, **_APPLIED}, "description": "The job as it is now."},
        304: {
            "description": "Unchanged since the version in If-None-Match.",
            "headers": {**_JOB_HEADERS, **_APPLIED},
        },
    },
)
async def get_job(
    request: Request, client: Caller, job_id: JobId, if_none_match: IfNoneMatch = None, prefer: Prefer = None
) -> Response:
    """One row is read, however many chunks the job has.

    With `Prefer: wait=N` the answer waits until the job ends, or, with `If-None-Match`, until it changes; for N seconds
    at most, and never longer than `GET /limits` says.
    """
    jobs, seconds = request.app.state.doors.jobs, _asked_to_wait(prefer)
    deadline = anyio.current_time() + (seconds or 0)
    while True:
        job: Job = await to_thread.run_sync(lambda: jobs.get(job_id, client=client))
        left = deadline - anyio.current_time()
        news = job.status.is_terminal if if_none_match is None else not _matches(if_none_match, job)
        if news or left <= 0 or await request.is_disconnected():
            break
        await anyio.sleep(min(_LOOK_AGAIN_SECONDS, left))
    answer = _job_answer(job, if_none_match)
    if seconds is not None:
        answer.headers["Preference-Applied"] = f"wait={seconds}"
    return answer


@router.get(
    "/jobs/{jobId:segment}/chunks",
    operation_id="listChunks",
    tags=["jobs"],
    summary="The chunks of a job",
    response_model=ChunksView,
    responses=problems(404),
)
def list_chunks(
    request: Request,
    client: Caller,
    job_id: JobId,
    status: Annotated[ChunkStatus | None, Query()] = None,
    page_size: PageSize = 100,
    cursor: Cursor = None,
) -> Response:
    """In the order of the job: by key, then by date."""
    jobs = request.app.state.doors.jobs
    jobs.get(job_id, client=client)
    shown, next_cursor = _page(jobs.chunks(job_id, after=_after(cursor), limit=page_size + 1, status=status), page_size)
    view = ChunksView(chunks=[_chunk_view(chunk) for chunk in shown], next_cursor=next_cursor)
    return JSONResponse(view.model_dump(by_alias=True))


@router.get(
    "/jobs/{jobId:segment}/manifest",
    operation_id="getManifest",
    tags=["files"],
    summary="The files of a job, with addresses and checksums",
    response_model=ManifestView,
    responses=problems(404),
)
def get_manifest(
    request: Request, client: Caller, job_id: JobId, page_size: PageSize = MAX_PAGE, cursor: Cursor = None
) -> Response:
    """Also for a job that failed or is not finished: the files that are there are good."""
    doors = request.app.state.doors
    job = doors.jobs.get(job_id, client=client)
    found = doors.jobs.chunks(job_id, after=_after(cursor), limit=page_size + 1, status=ChunkStatus.DONE)
    shown, next_cursor = _page(found, page_size)
    expires = datetime.now(UTC) + timedelta(seconds=DOWNLOAD_SECONDS)
    view = ManifestView(
        job_id=job_id,
        status=job.status.value,
        complete=job.status is JobStatus.COMPLETED,
        total=job.counts.total,
        done=job.counts.done,
        failed=job.counts.failed,
        format=job.format.value,
        formula_guard=job.formula_guard.value,
        dialect=CSV_DIALECT if job.format in (Format.CSV, Format.CSV_GZ) else None,
        files=[_file_view(doors, chunk, expires) for chunk in shown],
        next_cursor=next_cursor,
    )
    return JSONResponse(view.model_dump(by_alias=True))


@router.get(
    "/jobs/{jobId:segment}/files/{key}/{date}",
    operation_id="downloadFile",
    tags=["files"],
    summary="A fresh address of one file",
    status_code=HTTPStatus.TEMPORARY_REDIRECT,
    response_class=RedirectResponse,
    responses={
        **problems(404, 410),
        307: {"description": "Go there to read the file.", "headers": {"Location": header("Readable for an hour.")}},
    },
)
def download(
    request: Request,
    client: Caller,
    job_id: JobId,
    key: Annotated[str, Path(pattern=f"^{rules.KEY_PATTERN}$")],
    date: Annotated[str, Path(pattern=f"^(?:{rules.DATE_PATTERN})$")],
) -> Response:
    """Redirects to the object store; 410 if a later job put other bytes in their place."""
    doors = request.app.state.doors
    doors.jobs.get(job_id, client=client)
    chunk = _find_chunk(doors, job_id, key, date)
    if chunk is None or chunk.status != ChunkStatus.DONE:
        raise problem(
            HTTPStatus.NOT_FOUND, "file-not-found", "No such file.", "The chunk does not exist or is not done."
        )
    if not chunk.is_downloadable or (chunk.version_id is None and not _is_there(doors, chunk)):
        words = "The recorded bytes are not there any more: a later job made this file anew, or somebody removed it."
        raise problem(HTTPStatus.GONE, "file-superseded", "Replaced.", words)
    return RedirectResponse(_address(doors, chunk), status_code=HTTPStatus.TEMPORARY_REDIRECT)


@router.post(
    "/jobs/{jobId:segment}:cancel",
    operation_id="cancelJob",
    tags=["jobs"],
    summary="Stop a job",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    responses={**problems(404, 409), 202: {"headers": _JOB_HEADERS, "description": "It stops or has stopped."}},
)
def cancel(request: Request, client: Caller, job_id: JobId) -> Response:
    """Waiting chunks never start; running ones stop within a heartbeat. Repeating it is harmless."""
    job = request.app.state.doors.jobs.cancel(job_id, client=client)
    return _job_answer(job, None, status=HTTPStatus.ACCEPTED)


@router.post(
    "/jobs/{jobId:segment}:retry",
    operation_id="retryJob",
    tags=["jobs"],
    summary="Try the failed chunks of a failed job again",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    responses={**problems(404, 409), 202: {"headers": _JOB_HEADERS, "description": "The job goes on."}},
)
def retry(request: Request, client: Caller, job_id: JobId) -> Response:
    """Only the failed ones; files that are there stay there."""
    job = request.app.state.doors.jobs.retry(job_id, client=client)
    return _job_answer(job, None, status=HTTPStatus.ACCEPTED)


@router.get(
    "/limits",
    operation_id="getLimits",
    tags=["service"],
    summary="What is allowed",
    response_model=LimitsView,
    responses=problems(),
)
def limits(request: Request, client: Caller) -> Response:
    """The same for every client."""
    allowed = request.app.state.doors.limits
    view = LimitsView(
        max_chunks=allowed.max_chunks,
        max_body_bytes=allowed.max_body_bytes,
        max_attempts=allowed.max_attempts,
        max_page_size=MAX_PAGE,
        reuse_window_days=allowed.reuse_window_days,
        formats=[form.value for form in Format],
        formula_guards=FORMULA_GUARDS,
        key_pattern=f"^{rules.KEY_PATTERN}$",
        idempotency_hours=IDEMPOTENCY_HOURS,
        download_seconds=DOWNLOAD_SECONDS,
        requests_per_minute=allowed.requests_per_minute,
        longest_wait_seconds=LONGEST_WAIT_SECONDS,
    )
    return JSONResponse(view.model_dump(by_alias=True))


@router.get(
    "/webhook-secret",
    operation_id="getWebhookSecret",
    tags=["service"],
    summary="The key that signs your webhooks",
    response_model=SecretView,
    responses={
        **problems(),
        200: {"description": "Keep it secret.", "headers": {"Cache-Control": header("Never kept: `no-store`.")}},
    },
)
def webhook_secret(request: Request, client: Caller) -> Response:
    """Check `webhook-signature` with it, as Standard Webhooks says."""
    view = SecretView(secret=request.app.state.doors.clients.webhook_secret(client.client_id))
    return JSONResponse(view.model_dump(by_alias=True), headers={"Cache-Control": "no-store"})


@router.get(
    "/problems/{name}",
    operation_id="getProblemType",
    tags=["service"],
    summary="What a problem type means",
    response_model=ProblemTypeView,
    responses={404: problems(404)[404], 422: problems(422)[422]},
)
def problem_type(name: Annotated[str, Path(pattern="^[a-z-]{1,60}$", examples=["wrong-state"])]) -> Response:
    """Needs no key: the address stands in every error."""
    meaning = PROBLEM_TYPES.get(name)
    if meaning is None:
        raise problem(HTTPStatus.NOT_FOUND, "not-found", "No such type.", "See the list in the documentation.")
    return JSONResponse(ProblemTypeView(type=name, meaning=meaning).model_dump(by_alias=True))


def _asked_to_wait(prefer: str | None) -> int | None:
    """Seconds of `Prefer: wait=N`, within the limit; None if nobody asked."""
    found = next((match for one in (prefer or "").split(",") if (match := _WAIT.fullmatch(one))), None)
    return None if found is None else min(int(found[1]), LONGEST_WAIT_SECONDS)


def _preferences(prefer: str | None) -> set[str]:
    return {one.partition(";")[0].strip().lower() for one in (prefer or "").split(",")}


def _tag(job: Job) -> str:
    return f'W/"{job.version}"'


def _matches(if_none_match: str, job: Job) -> bool:
    """RFC 9110: weak comparison, so a tag matches with or without `W/`; `*` matches any version."""
    told = {part.strip().removeprefix("W/") for part in if_none_match.split(",")}
    return bool(told & {"*", _tag(job).removeprefix("W/")})


def _job_answer(job: Job, if_none_match: str | None, *, status: HTTPStatus = HTTPStatus.OK) -> Response:
    headers = {"ETag": _tag(job)}
    if not job.status.is_terminal:
        headers["Retry-After"] = str(POLL_SECONDS if job.counts.total <= MAX_PAGE else _SLOW_POLL_SECONDS)
    if if_none_match is not None and _matches(if_none_match, job):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return JSONResponse(_job_view(job).model_dump(by_alias=True), status_code=status, headers=headers)


def _job_view(job: Job) -> JobView:
    return JobView(
        job_id=job.job_id,
        status=job.status.value,
        **vars(job.counts),
        files_generated=job.generated,
        files_reused=job.reused,
        s3_base_path=job.s3_base_path,
        error_message=job.error_message if job.status.is_terminal else None,
        percent=rules.percent(job.counts),
        rows=job.rows,
        bytes=job.bytes,
        eta_seconds=None
        if job.status.is_terminal
        else rules.eta_seconds(job.counts, started_at=job.started_at, updated_at=job.updated_at),
        format=job.format.value,
        formula_guard=job.formula_guard.value,
        cancel_requested=job.cancel_requested,
        duplicates_removed=job.duplicates_removed,
        as_of=_instant(job.as_of) or "",
        created_at=_instant(job.created_at) or "",
        updated_at=_instant(job.updated_at) or "",
        started_at=_instant(job.started_at),
        completed_at=_instant(job.completed_at),
    )


def _chunk_view(chunk: Chunk) -> ChunkView:
    return ChunkView(
        key=chunk.key,
        effective_date=f"{chunk.effective_date:%Y%m%d}",
        status=chunk.status,
        attempts=chunk.attempts,
        reused=chunk.reused,
        rows=chunk.rows,
        bytes=chunk.bytes,
        rows_so_far=chunk.rows_so_far,
        started_at=_instant(chunk.started_at),
        completed_at=_instant(chunk.completed_at),
        error_message=chunk.error_message,
    )


def _file_view(doors: Any, chunk: Chunk, expires: datetime) -> FileView:
    there = chunk.is_downloadable
    return FileView.model_validate(
        {
            "key": chunk.key,
            "date": f"{chunk.effective_date:%Y%m%d}",
            "object_key": chunk.object_key,
            "url": _address(doors, chunk) if there else None,
            "url_expires_at": _instant(expires) if there else None,
            "superseded": not there,
            "columns": chunk.columns or [],
            "as_of": _instant(chunk.as_of),
            **{name: getattr(chunk, name) for name in ("sha256", "bytes", "rows", "generation", "reused")},
        }
    )


def _address(doors: Any, chunk: Chunk) -> str:
    key = str(chunk.object_key)
    address: str = doors.objects.presign(
        key, seconds=DOWNLOAD_SECONDS, version_id=chunk.version_id, file_name=key.rpartition("/")[2]
    )
    return address


def _is_there(doors: Any, chunk: Chunk) -> bool:
    found = doors.objects.etag(str(chunk.object_key))
    if found is None:
        doors.objects.assert_bucket()  # a bucket that is not there is our fault, and the file is not gone
    return bool(found == chunk.current_etag)


def _find_chunk(doors: Any, job_id: str, key: str, date: str) -> Chunk | None:
    day = datetime.strptime(date, "%Y%m%d").replace(tzinfo=UTC).date()
    ordinal = doors.jobs.ordinal(job_id, ChunkRequest(key, day).chunk_key)
    if ordinal is None:
        return None
    (chunk,) = doors.jobs.chunks(job_id, after=ordinal - 1, limit=1)
    found: Chunk = chunk
    return found


def _page(found: list[Chunk], size: int) -> tuple[list[Chunk], str | None]:
    shown = found[:size]
    return shown, f"{shown[-1].ordinal:016x}" if len(found) > size else None


def _after(cursor: str | None) -> int:
    return min(int(cursor, 16), 2**31 - 1) if cursor else -1


def _instant(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
