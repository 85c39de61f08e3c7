"""One pipeline for every log line: structlog and stdlib records, with the trace, without secrets.

What belongs here: configuration, the trace field and redaction. What does not: what to log; callers name
events in lower case and put values in fields, never into the text.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final, Literal, TextIO
from urllib.parse import unquote, urlsplit
from uuid import UUID

import structlog
from pydantic import BaseModel, SecretBytes, SecretStr
from structlog.typing import EventDict, Processor, WrappedLogger

from lockstep.kernel.trace import current_trace

LogFormat = Literal["json", "console"]
Logger = structlog.stdlib.BoundLogger

MASK: Final = "[redacted]"

_SENSITIVE: Final = (
    r"pass(?:word|wd|phrase)|pwd|secret|token|authorization|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|cookie|signature|\bdsn|dsn\b"
)
_SENSITIVE_NAME = re.compile(_SENSITIVE, re.IGNORECASE)
_DEEPEST = 8
_SHORTEST_KNOWN_SECRET = 6  # masking a shorter literal would blacken ordinary words

# Each pattern keeps what a person needs to recognise the line and masks only the secret part.
_SENSITIVE_TEXT: Final = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL, MASK),
        # user:password@ in any URL. A port followed by a path is not a password, even if an @ comes later.
        (r"([a-z][a-z0-9+.-]*://[^\s:/@\"']*:)(?!\d+[/?#])[^\s\"'<>]+@", re.IGNORECASE, rf"\1{MASK}@"),
        (r"(authorization[\"']?\s*[:=]\s*[\"']?)[^\r\n\"']+", re.IGNORECASE, rf"\1{MASK}"),
        (r"\b(bearer\s+)[\w.~+/=-]{6,}", re.IGNORECASE, rf"\1{MASK}"),
        (r"\b(basic\s+)(?=\S*[A-Z0-9=])[A-Za-z0-9+/]{8,}={0,2}", 0, rf"\1{MASK}"),
        (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", 0, MASK),
        (r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b", 0, MASK),
        # 40 mixed base64 characters: the shape of an AWS secret key. A SHA-1 has no upper case and is kept.
        (
            r"(?<![\w/+=.-])(?=[A-Za-z0-9/+]*[A-Z])(?=[A-Za-z0-9/+]*[a-z])(?=[A-Za-z0-9/+]*\d)"
            r"[A-Za-z0-9/+]{40}(?![\w/+=.-])",
            0,
            MASK,
        ),
        (
            r"((?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig)=)[^&\s\"'<>]+",
            re.IGNORECASE,
            rf"\1{MASK}",
        ),
        # name=value, name: value and the same inside JSON or a repr, for names that mean a secret.
        (
            rf"([\"']?[\w.-]*(?:{_SENSITIVE})[\w-]*[\"']?\s*[=:]\s*)"
            r"(?!\[redacted\])(?:SecretStr\()?(?:b?\"(?:[^\"\\]|\\.)*\"|b?'(?:[^'\\]|\\.)*'|[^\s,;&)}\]]+)",
            re.IGNORECASE,
            rf"\1{MASK}",
        ),
    )
)


def configure_logging(
    level: str,
    fmt: LogFormat,
    *,
    service: str,
    stream: TextIO | None = None,
    secrets: Iterable[SecretStr] = (),
) -> None:
    """Send every line of this process through one redacting pipeline. Call once at start; repeating is safe.

    Args:
        level: Lowest level that is written, by name.
        fmt: `json` for machines, `console` for people.
        service: Written in every line, so that lines of many services can share one place.
        stream: Where lines go; stderr by default, because stdout belongs to a program's answer.
        secrets: Known values to mask wherever they appear, for secrets that no pattern can recognise.
    """
    target = stream or sys.stderr
    chain = _chain(service, _literals(secrets))
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(fmt, target)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    _adopt_foreign_loggers()
    _configure_structlog(chain)
    _log_uncaught()


def get_logger(name: str) -> Logger:
    """The logger of one module. Redacts even before `configure_logging` was called."""
    if not structlog.is_configured():
        _configure_structlog(_chain(None, ()))
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger


def redact_text(text: str, *, known: tuple[str, ...] = ()) -> str:
    """`text` with known literals and everything that looks like a secret masked."""
    for literal in known:
        text = text.replace(literal, MASK)
    for pattern, replacement in _SENSITIVE_TEXT:
        text = pattern.sub(replacement, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether a field, header or parameter of this name holds a secret."""
    return _SENSITIVE_NAME.search(name.replace("_", "-").lower()) is not None


def _redact(value: Any, known: tuple[str, ...], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redact_text(value, known=known)
    if isinstance(value, SecretStr | SecretBytes):
        return MASK
    if isinstance(value, datetime | date | UUID | PurePath):
        return redact_text(str(value), known=known)
    if depth < _DEEPEST:
        inner = _redact_container(value, known, depth + 1)
        if inner is not None:
            return inner
    return redact_text(_describe(value), known=known)


def _redact_container(value: Any, known: tuple[str, ...], depth: int) -> Any:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            redact_text(str(key), known=known): (
                MASK if item is not None and is_secret_name(str(key)) else _redact(item, known, depth)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact(item, known, depth) for item in value]
    return None


def _describe(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _redactor(known: tuple[str, ...]) -> Processor:
    def mask(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        # Underscored keys are structlog's own notes (the record object) and never reach the output.
        notes = {key: value for key, value in event.items() if key.startswith("_")}
        try:
            shown = _redact({k: v for k, v in event.items() if not k.startswith("_")}, known, 0)
        except Exception as error:
            # Fail closed: a line that cannot be checked is not written, and its absence is visible.
            shown = {"event": "log line withheld: redaction failed", "cause": type(error).__name__}
        return {**shown, **notes}

    return mask


def _add_trace(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event.setdefault("trace", current_trace())
    return event


def _add_service(service: str | None) -> Processor:
    def add(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if service is not None:
            event.setdefault("service", service)
        return event

    return add


def _chain(service: str | None, known: tuple[str, ...]) -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
        _add_trace,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,  # exception text must exist before redaction can read it
        _redactor(known),
    ]


def _renderer(fmt: LogFormat, target: TextIO) -> Processor:
    if fmt == "json":
        return structlog.processors.JSONRenderer(sort_keys=False)
    return structlog.dev.ConsoleRenderer(
        colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
    )


def _configure_structlog(chain: list[Processor]) -> None:
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *chain,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a logger made at import must follow a later configure_logging
    )


def _adopt_foreign_loggers() -> None:
    """Remove handlers that libraries installed on their own loggers, so that no line bypasses redaction."""
    logging.captureWarnings(capture=True)
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
    # uvicorn builds these at start; access lines are INFO and would otherwise keep their own level.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).propagate = True


def _log_uncaught() -> None:
    """Python prints uncaught exceptions itself, unredacted; log them instead."""

    def on_crash(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, where)
            return
        _uncaught((kind, error, where))

    def on_thread_crash(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            _uncaught((args.exc_type, args.exc_value, args.exc_traceback))

    sys.excepthook = on_crash
    threading.excepthook = on_thread_crash


def _uncaught(error: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
    write: Callable[..., Any] = get_logger("lockstep").critical
    write("uncaught exception", exc_info=error)


def _literals(secrets: Iterable[SecretStr]) -> tuple[str, ...]:
    """Values to mask verbatim: each secret, and the password inside it if it is an address."""
    found: set[str] = set()
    for secret in secrets:
        value = secret.get_secret_value()
        found.add(value)
        password = urlsplit(value).password if "://" in value else None
        found.update({password, unquote(password)} if password else ())
    return tuple(sorted((one for one in found if len(one) >= _SHORTEST_KNOWN_SECRET), key=len, reverse=True))
