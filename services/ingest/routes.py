"""Routes of the ingest service: read the request, ask the store or the committer, spell the answer.

What belongs here: HTTP. What does not: rules, SQL, Spark, and the words of the contract (contract.py).
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader

from lockstep.kernel import strict_json
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, Transient
from lockstep.ticks import footers, rules
from lockstep.ticks.errors import NoSuch, OverQuota, PartConflict
from lockstep.ticks.model import Part, Project, Tick, TickState, spell
from lockstep.ticks.rules import InvalidManifest
from lockstep.ticks.store import Received, Recorded
from services.ingest.body import Spooled, announced_sha256, announced_size, drain, small_body, spooled
from services.ingest.contract import (
    EXAMPLE_PROJECT,
    EXAMPLE_TICK,
    PROBLEM_TYPES,
    FinalizeView,
    LimitsView,
    PartView,
    ProblemTypeView,
    ReceivedView,
    RemovedView,
    StatusView,
    TickView,
    problem,
    problems,
)
from services.openapi import header

router = APIRouter()

_TICK = "/v1/projects/{project_id}/ticks/{tick_id}"
_PART = f"{_TICK}/parts/{{file_seq}}"
_org_header = APIKeyHeader(name="X-Api-Key", scheme_name="org", auto_error=False, description="The organisation.")
_secret_header = APIKeyHeader(
    name="X-Api-Secret", scheme_name="secret", auto_error=False, description="From `lockstep ticks project add`."
)
_PART_HEADERS = {"ETag": header("The SHA-256 of the stored bytes, in quotes."), "X-Sha256": header("The same, bare.")}


def _authenticated(
    request: Request,
    org: Annotated[str | None, Security(_org_header)],
    secret: Annotated[str | None, Security(_secret_header)],
) -> Project:
    doors = request.app.state.doors
    if doors is None:
        raise Transient("no state database is known.", next_step="start the stack, or set LOCKSTEP_POSTGRES_DSN.")
    project: Project | None = doors.projects.authenticate(org, secret)
    if project is None:
        raise problem(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            "Who are you?",
            "X-Api-Key or X-Api-Secret is missing, wrong, expired or revoked.",
            headers={"WWW-Authenticate": 'ApiKey realm="ticks"'},
        )
    return project


def _project(request: Request, project: Annotated[Project, Depends(_authenticated)]) -> Project:
    # What a secret does not open does not exist, be it another organisation's or malformed.
    if request.path_params.get("project_id") != project.project_id:
        raise problem(
            HTTPStatus.NOT_FOUND, "project-not-found", "No such project.", "Your secret opens no such project."
        )
    budget = request.app.state.doors.budgets.spend(f"ticks/{project.org_id}")
    if not budget.granted:
        raise OverQuota("too many requests at once.", unit=project.org_id, retry_after=budget.retry_seconds)
    return project


Caller = Annotated[Project, Depends(_project)]
ProjectId = Annotated[str, Path(pattern=f"^{rules.PROJECT_PATTERN}$", examples=[EXAMPLE_PROJECT])]
TickId = Annotated[str, Path(pattern=f"^{rules.TICK_PATTERN}$", examples=[EXAMPLE_TICK])]
FileSeq = Annotated[str, Path(pattern=f"^{rules.SEQ_PATTERN}$", examples=["0"])]
IfMatch = Annotated[
    str | None,
    Header(alias="If-Match", description="SHA-256 of the part to replace or remove, in quotes; `*` for any."),
]


@router.put(
    _PART,
    operation_id="putPart",
    tags=["parts"],
    summary="Store one part of a tick",
    status_code=HTTPStatus.ACCEPTED,
    response_model=PartView,
    responses={
        **problems(400, 408, 409, 411, 412, 413, 425),
        200: {"description": "An equal part was there.", "model": PartView, "headers": _PART_HEADERS},
        202: {"description": "Stored.", "headers": _PART_HEADERS},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}}},
        }
    },
)
async def put_part(
    request: Request,
    project: Caller,
    project_id: ProjectId,
    tick_id: TickId,
    file_seq: FileSeq,
    x_sha256: Annotated[str | None, Header(alias="X-Sha256")] = None,
    content_digest: Annotated[str | None, Header(alias="Content-Digest")] = None,
    if_match: IfMatch = None,
) -> Response:
    """Hashed while it arrives, stored whole, recorded last. Any replica may take it; any order is good."""
    doors, number = request.app.state.doors, int(file_seq)
    size = announced_size(request, doors.limits)
    sha256 = announced_sha256(x_sha256, content_digest)
    known: Part | None = await to_thread.run_sync(doors.store.part, project_id, tick_id, number)
    replaces = matched(if_match, known)
    if known is not None and (known.sha256 == sha256 or replaces is None):
        await drain(request, doors.limits)
        if known.sha256 == sha256:
            return _stored(Recorded(known, created=False, obsolete=None))
        raise PartConflict("another file is stored under this number.", unit=f"part {number}", stored=known.sha256)
    try:
        await to_thread.run_sync(lambda: doors.store.check_room(project, tick_id, number, size, replaces=replaces))
    except LockstepError:
        await drain(request, doors.limits)
        raise
    async with spooled(request, size, doors.limits) as body:
        if body.sha256 != sha256:
            raise problem(
                HTTPStatus.BAD_REQUEST,
                "digest-mismatch",
                "Other bytes arrived.",
                f"The body has SHA-256 {body.sha256}, not {sha256}. Nothing was stored.",
            )
        recorded = await to_thread.run_sync(
            _store_part, doors, project, tick_id, number, body, replaces, limiter=doors.part_threads
        )
    return _stored(recorded)


def _store_part(
    doors: Any, project: Project, tick_id: str, number: int, body: Spooled, replaces: str | None
) -> Recorded:
    footer, why = None, None
    try:
        footer = footers.read_footer(body.file, body.size)
    except footers.NotUsable as error:
        why = error.what  # kept with the part: the finalize that needs it says so
    key = doors.parts.put(project.project_id, tick_id, number, body.file)
    crash_point("ticks.part.stored")
    received = Received(number, body.sha256, body.size, footer, why)
    try:
        recorded: Recorded = doors.store.record(project, tick_id, received, key, replaces=replaces)
    except LockstepError as error:
        # After a lost answer the row may be there and name this object; a quota has answered.
        if isinstance(error, OverQuota) or not isinstance(error, Transient):
            _remove_quietly(doors, key)
        raise
    if recorded.obsolete is not None:
        _remove_quietly(doors, recorded.obsolete)
    if recorded.created:
        doors.metrics.part_bytes.inc(body.size)
    return recorded


def _remove_quietly(doors: Any, key: str) -> None:
    try:
        doors.parts.remove([key])
    except Transient:
        return  # nothing names it: the sweep finds it


@router.head(
    _PART,
    operation_id="headPart",
    tags=["parts"],
    summary="Is this part there",
    response_class=Response,
    responses={**problems(), 200: {"description": "It is.", "headers": _PART_HEADERS}},
)
def head_part(request: Request, project: Caller, project_id: ProjectId, tick_id: TickId, file_seq: FileSeq) -> Response:
    """Its SHA-256 and size, in headers: ask before sending a part again over a slow line."""
    part = request.app.state.doors.store.part(project_id, tick_id, int(file_seq))
    if part is None:
        raise NoSuch("there is no such part.", unit=f"part {file_seq}")
    return Response(headers=_part_headers(part) | {"X-Part-Bytes": str(part.bytes)})


@router.delete(
    _PART,
    operation_id="deletePart",
    tags=["parts"],
    summary="Remove a part of an open tick",
    response_model=RemovedView,
    responses=problems(409, 412, 425),
)
def delete_part(
    request: Request,
    project: Caller,
    project_id: ProjectId,
    tick_id: TickId,
    file_seq: FileSeq,
    if_match: IfMatch = None,
) -> Response:
    """So that another file can take its number."""
    doors = request.app.state.doors
    number = int(file_seq)
    known = doors.store.part(project_id, tick_id, number) if if_match is not None else None
    key = doors.store.remove_part(project, tick_id, number, only=matched(if_match, known))
    _remove_quietly(doors, key)
    return JSONResponse(RemovedView(removed=1).model_dump())


@router.get(
    _TICK,
    operation_id="getTick",
    tags=["ticks"],
    summary="Where a tick stands and what it lacks",
    response_model=TickView,
    responses=problems(),
)
def get_tick(request: Request, project: Caller, project_id: ProjectId, tick_id: TickId) -> Response:
    """What an agent asks after a crash, to go on where it was."""
    doors = request.app.state.doors
    tick = doors.store.find(project_id, tick_id)
    if tick is None:
        raise NoSuch("there is no such tick.", unit=f"tick {tick_id}")
    parts = doors.store.parts(project_id, tick_id)
    expires = timedelta(days=doors.limits.upload_days)
    return JSONResponse(_tick_view(tick, parts, expires).model_dump())


@router.delete(
    _TICK,
    operation_id="deleteTick",
    tags=["ticks"],
    summary="Forget a tick that is not committed",
    response_model=RemovedView,
    responses=problems(409, 425),
)
def delete_tick(request: Request, project: Caller, project_id: ProjectId, tick_id: TickId) -> Response:
    """With all its parts."""
    doors = request.app.state.doors
    keys = doors.store.remove_tick(project, tick_id)
    for key in keys:
        _remove_quietly(doors, key)
    return JSONResponse(RemovedView(removed=len(keys)).model_dump())


@router.post(
    f"{_TICK}/finalize",
    operation_id="finalizeTick",
    tags=["ticks"],
    summary="Commit a tick",
    response_model=FinalizeView,
    responses={
        **problems(400, 408, 409, 413, 425),
        200: {
            "description": "Committed: in bronze, in the ledger, and announced.",
            "headers": {"Idempotent-Replayed": header("`true` when the tick was committed before this call.")},
        },
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Manifest"}}},
        }
    },
)
async def finalize(request: Request, project: Caller, project_id: ProjectId, tick_id: TickId) -> Response:
    """Checks the parts against the manifest, ingests, commits, announces, answers: all before the 200."""
    doors = request.app.state.doors
    begun, outcome = time.perf_counter(), "failed"
    raw = await small_body(request, doors.limits.max_manifest_bytes, doors.limits)
    body = _json(raw, tick_id)
    try:
        async with doors.turns.turn(project.org_id, project_id, tick_id):
            if doors.stopping.is_set():
                raise Transient("this replica is stopping.", next_step="ask again.", retry_after=1.0)
            done = await to_thread.run_sync(
                doors.committer.finalize, project, tick_id, body, limiter=doors.commit_threads
            )
        outcome = "replayed" if done.replayed else "committed"
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        doors.metrics.finalize(outcome, time.perf_counter() - begun)
    headers = {"Idempotent-Replayed": "true"} if done.replayed else {}
    return JSONResponse(dict(done.result), headers=headers)


@router.get(
    "/v1/projects/{project_id}/status",
    operation_id="getStatus",
    tags=["ticks"],
    summary="The ticks of a project by state",
    response_model=StatusView,
    responses=problems(),
)
def status(request: Request, project: Caller, project_id: ProjectId) -> Response:
    """And the end of its chain."""
    found = request.app.state.doors.store.status(project_id)
    open_since = [at for state, at in found.oldest.items() if state is not TickState.COMMITTED]
    view = StatusView(
        project_id=project_id,
        org_id=project.org_id,
        ticks={state.value: found.counts.get(state, 0) for state in TickState},
        sequence=project.sequence,
        head_tick_id=project.head_tick_id,
        oldest_open_at=_instant(min(open_since, default=None)),
    )
    return JSONResponse(view.model_dump())


@router.get(
    "/v1/limits",
    operation_id="getLimits",
    tags=["service"],
    summary="What is allowed",
    response_model=LimitsView,
    responses=problems(common=(401, 503)),
)
def limits(request: Request, project: Annotated[Project, Depends(_authenticated)]) -> Response:
    """The same for every project."""
    allowed = request.app.state.doors.limits
    view = LimitsView(**{name: getattr(allowed, name) for name in LimitsView.model_fields})
    return JSONResponse(view.model_dump())


@router.get(
    "/problems/{name}",
    operation_id="getProblemType",
    tags=["service"],
    summary="What a problem type means",
    response_model=ProblemTypeView,
    responses=problems(404, 422, common=()),
)
def problem_type(name: Annotated[str, Path(pattern="^[a-z-]{1,60}$", examples=["part-conflict"])]) -> Response:
    """Needs no key: the address stands in every error."""
    meaning = PROBLEM_TYPES.get(name)
    if meaning is None:
        raise problem(HTTPStatus.NOT_FOUND, "not-found", "No such type.", "See docs/ticks.md.")
    return JSONResponse(ProblemTypeView(type=name, meaning=meaning).model_dump())


def _json(raw: bytes, tick_id: str) -> object:
    try:
        return strict_json.read(raw)
    except strict_json.Unreadable as reason:
        raise InvalidManifest("InvalidManifest", f"the manifest {reason}.", unit=f"tick {tick_id}") from None


def matched(if_match: str | None, stored: Part | None) -> str | None:
    """The SHA-256 that must be stored, by `If-Match` (RFC 9110, 13.1.1): `*`, or tags of which one is enough.

    None without the header. Any other tag is one of bytes that are not stored, so it answers 412, never nothing.
    """
    if if_match is None:
        return None
    tags = [tag.strip().strip('"').lower() for tag in if_match.split(",")]
    if stored is not None and (tags == ["*"] or stored.sha256 in tags):
        return stored.sha256
    return tags[0]


def _stored(recorded: Recorded) -> Response:
    part = recorded.part
    view = PartView(
        file_seq=part.file_seq,
        sha256=part.sha256,
        bytes=part.bytes,
        received_at=spell(part.received_at),
        already_present=not recorded.created,
    )
    status = HTTPStatus.ACCEPTED if recorded.created else HTTPStatus.OK
    return JSONResponse(view.model_dump(), status_code=status, headers=_part_headers(part))


def _part_headers(part: Part) -> dict[str, str]:
    return {"ETag": f'"{part.sha256}"', "X-Sha256": part.sha256}


def _tick_view(tick: Tick, parts: dict[int, Part], expires: timedelta) -> TickView:
    committed = tick.state is TickState.COMMITTED
    # A committed tick lacks nothing, also when its parts were forgotten after their time.
    difference = rules.compare_declared(None if committed else tick.manifest, parts)
    return TickView(
        tick_id=tick.tick_id,
        project_id=tick.project_id,
        org_id=tick.org_id,
        state=tick.state.value,
        parts_received={
            str(number): ReceivedView(sha256=part.sha256, bytes=part.bytes, received_at=spell(part.received_at))
            for number, part in parts.items()
        },
        missing=list(difference.missing),
        mismatched_sha=list(difference.mismatched_sha),
        result=dict(tick.result) if tick.result else None,
        error=dict(tick.error) if tick.error else None,
        sequence=tick.sequence,
        prev_tick_id=tick.prev_tick_id,
        created_at=spell(tick.created_at),
        updated_at=spell(tick.updated_at),
        committed_at=_instant(tick.committed_at),
        expires_at=None if committed else spell(tick.updated_at + expires),
    )


def _instant(moment: datetime | None) -> str | None:
    return None if moment is None else spell(moment)
