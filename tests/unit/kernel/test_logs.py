"""Log lines: one shape, one trace, no secrets. Every test plants a secret and greps what was written."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from lockstep.kernel import logs
from lockstep.kernel.trace import bind_trace

PLANTED = "hunter2-s3cr3t"
AWS_ID = "AKIA" + "IOSFODNN7EXAMPLE"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that is written while the pipeline is configured for JSON."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before = (list(root.handlers), root.level)
    out = io.StringIO()
    logs.configure_logging("DEBUG", "json", service="tests", stream=out)
    yield out
    root.handlers[:], root.level = before
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


def last(out: io.StringIO) -> dict[str, Any]:
    line = out.getvalue().strip().splitlines()[-1]
    return dict(json.loads(line))


@dataclasses.dataclass
class Login:
    """A dataclass with a plain secret."""

    user: str
    password: str


class Account(BaseModel):
    """A model with a wrapped secret."""

    name: str
    api_key: SecretStr
    nested: dict[str, Any] = {}


def test_a_line_is_json_with_service_level_time_and_trace(lines: io.StringIO) -> None:
    with bind_trace("a" * 32):
        logs.get_logger("windows").info("window applied", vault="acme", rows=3)
    line = last(lines)
    assert (line["event"], line["vault"], line["rows"]) == ("window applied", "acme", 3)
    assert (line["service"], line["level"], line["logger"]) == ("tests", "info", "windows")
    assert line["trace"] == "a" * 32
    assert line["timestamp"].endswith("Z")


def test_a_line_outside_any_trace_says_so(lines: io.StringIO) -> None:
    logs.get_logger("x").info("idle")
    assert last(lines)["trace"] is None


def test_stdlib_lines_take_the_same_way(lines: io.StringIO) -> None:
    """A library that logs past the pipeline would print what redaction would have masked."""
    foreign = logging.getLogger("botocore.endpoint")
    with bind_trace("b" * 32):
        foreign.warning("sending Authorization: Bearer %s", PLANTED)
    line = last(lines)
    assert (line["logger"], line["trace"]) == ("botocore.endpoint", "b" * 32)
    assert PLANTED not in lines.getvalue()


def test_a_library_that_brought_its_own_handler_is_adopted(lines: io.StringIO) -> None:
    private = io.StringIO()
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(logging.StreamHandler(private))
    uvicorn.propagate = False
    logs.configure_logging("DEBUG", "json", service="tests", stream=lines)
    uvicorn.info("started with token=%s", PLANTED)
    assert private.getvalue() == ""
    assert last(lines)["logger"] == "uvicorn.error"
    assert PLANTED not in lines.getvalue()


@pytest.mark.parametrize(
    "key",
    [
        "password", "db_password", "PASSWD", "passphrase", "secret", "client-secret", "token", "refreshToken",
        "authorization", "Authorization", "api_key", "apiKey", "x-api-key", "X-Api-Secret", "dsn",
        "postgres_dsn", "aws_secret_access_key", "credential", "credentials", "private_key",
        "set-cookie", "signature", "pwd",
    ],
)  # fmt: skip
def test_a_field_named_like_a_secret_is_masked(lines: io.StringIO, key: str) -> None:
    logs.get_logger("x").info("call", **{key: PLANTED})
    logs.get_logger("x").info("call", headers={"a": [{key: PLANTED}]})
    logs.get_logger("x").info(f"call failed with {key}={PLANTED} and {{'{key}': '{PLANTED}'}}")
    assert PLANTED not in lines.getvalue()
    assert logs.MASK in lines.getvalue()


@pytest.mark.parametrize("key", ["vault", "stop", "keyboard", "rows", "lane", "passed", "key", "fence", "etag"])
def test_an_ordinary_field_is_kept(lines: io.StringIO, key: str) -> None:
    """Over-eager masking would hide the very facts an operator needs."""
    logs.get_logger("x").info("call", **{key: "plain"})
    assert last(lines)[key] == "plain"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://app:{PLANTED}@db.example.com:5432/lockstep",
        f"redis://:{PLANTED}@cache:6379/0",
        f"postgresql://app:p@{PLANTED}@db/x",
        f"host=db user=app password={PLANTED} dbname=x",
        f"host=db password='{PLANTED} with blank' dbname=x",
        f"Authorization: Bearer {PLANTED}",
        f"authorization: AWS4-HMAC-SHA256 Credential={PLANTED}/2026, Signature={PLANTED}",
        f"sent bearer {PLANTED}",
        f"curl -H 'X-Api-Key: {PLANTED}'",
        f'{{"outer": {{"client_secret": "{PLANTED}"}}}}',
        f"https://bucket.example.com/k?X-Amz-Credential={PLANTED}&X-Amz-Signature={PLANTED}&x=1",
        f"https://bucket.example.com/k?AWSAccessKeyId={PLANTED}&Signature={PLANTED}&Expires=1",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_inside_text_is_masked(lines: io.StringIO, text: str) -> None:
    logs.get_logger("x").info(text)
    logs.get_logger("x").info("call", note=[text], raw=text.encode())
    assert PLANTED not in lines.getvalue()


@pytest.mark.parametrize("secret", [AWS_ID, AWS_SECRET, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"])
def test_well_known_secret_shapes_are_masked_without_a_name(lines: io.StringIO, secret: str) -> None:
    logs.get_logger("x").info("got", value=secret, text=f"key {secret} refused")
    assert secret not in lines.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "http://127.0.0.1:9324/000000000000/job-chunk-work",
        "http://host:8080/path?mail=someone@example.com",
        "s3://lockstep-lake/org=1/project=2/part-00000.parquet",
        "018f3c5e-7b1c-7d3e-8f4a-5b6c7d8e9f00",
    ],
)
def test_text_that_is_no_secret_stays_whole(lines: io.StringIO, text: str) -> None:
    logs.get_logger("x").info("got", value=text)
    assert last(lines)["value"] == text


def test_secrets_in_objects_are_masked(lines: io.StringIO) -> None:
    logs.get_logger("x").info(
        "objects",
        a=Login("ann", PLANTED),
        b=Account(name="n", api_key=SecretStr(PLANTED), nested={"token": PLANTED}),
        c=SecretStr(PLANTED),
        d=({"password": PLANTED},),
        e=object(),
    )
    assert PLANTED not in lines.getvalue()
    assert last(lines)["a"]["user"] == "ann"


def test_a_secret_deeper_than_the_walk_is_still_masked(lines: io.StringIO) -> None:
    deep: Any = {"password": PLANTED}
    for _ in range(30):
        deep = {"inner": deep}
    logs.get_logger("x").info("deep", value=deep)
    assert PLANTED not in lines.getvalue()


def test_exception_text_and_its_causes_are_masked(lines: io.StringIO) -> None:
    """Drivers put the whole connection string into their errors."""
    try:
        try:
            raise OSError(f"cannot reach postgresql://app:{PLANTED}@db/x")
        except OSError as cause:
            raise RuntimeError(f"login with password={PLANTED} failed") from cause
    except RuntimeError:
        logs.get_logger("x").exception("refused")
        logging.getLogger("foreign").exception("refused")
    assert PLANTED not in lines.getvalue()
    assert lines.getvalue().count("RuntimeError: login with password=") == 2


def test_an_uncaught_exception_is_logged_masked(lines: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        raise RuntimeError(f"token={PLANTED}")

    thread = threading.Thread(target=die)
    thread.start()
    thread.join(10)
    try:
        die()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    captured = capsys.readouterr()
    assert PLANTED not in lines.getvalue() + captured.out + captured.err
    assert lines.getvalue().count("uncaught exception") == 2


def test_a_known_secret_is_masked_wherever_it_appears(lines: io.StringIO) -> None:
    """A bare password inside prose has no shape to recognise; only its value gives it away."""
    dsn = SecretStr(f"postgresql://app:{PLANTED}@db/x")
    logs.configure_logging("INFO", "json", service="tests", stream=lines, secrets=[dsn])
    logs.get_logger("x").info(f"the server said that {PLANTED} is wrong")
    assert PLANTED not in lines.getvalue()


def test_the_console_format_masks_too(lines: io.StringIO) -> None:
    logs.configure_logging("INFO", "console", service="tests", stream=lines)
    try:
        raise ValueError(f"password={PLANTED}")
    except ValueError:
        logs.get_logger("x").exception("call", token=PLANTED, vault="acme")
    assert PLANTED not in lines.getvalue()
    assert "vault" in lines.getvalue()


def test_a_value_that_cannot_be_shown_does_not_stop_the_program(lines: io.StringIO) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    logs.get_logger("x").info("odd", value=Broken())
    assert "cannot be shown" in last(lines)["value"]


def test_a_line_that_cannot_be_checked_is_withheld(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing open here would print the secret that broke the check."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(logs, "redact_text", broken)
    logs.get_logger("x").info("call", value=PLANTED)
    assert PLANTED not in lines.getvalue()
    assert "withheld" in last(lines)["event"]


def test_lines_below_the_level_are_not_written(lines: io.StringIO) -> None:
    logs.configure_logging("WARNING", "json", service="tests", stream=lines)
    logs.get_logger("x").info("quiet")
    assert lines.getvalue() == ""


def test_a_logger_is_safe_before_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    logs.get_logger("early").error("call", password=PLANTED)
    captured = capsys.readouterr()
    assert PLANTED not in captured.out + captured.err
    structlog.reset_defaults()


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_redaction_never_fails_and_its_result_is_stable(value: Any) -> None:
    once = logs._redact(value, (), 0)
    assert logs._redact(once, (), 0) == once
