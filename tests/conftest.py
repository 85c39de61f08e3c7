"""Shared fixtures: one embedded stack per test run, and fresh databases, queues and buckets on it.

The stack of the tests has its own home and ports, so tests run beside a stack that is up. Every worker asks for it; the
first one starts it. A run stops it at its end, unless another run of the same tree still uses it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
import pytest

from lockstep.kernel.logs import get_logger
from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from tests.databases import fresh_database
from tests.sharing import Users

if TYPE_CHECKING:
    from stack.lifecycle import Stack

# Mutated copies of the tree run their tests on the stack of the tree they were copied from.
CLUSTERED = os.environ.get("LOCKSTEP_TEST_SPARK_CLUSTER", "") not in ("", "0", "false")
_DEFAULT_HOME = PROJECT_ROOT / (".lockstep-test-cluster" if CLUSTERED else ".lockstep-test")
TEST_HOME = Path(os.environ.get("LOCKSTEP_TEST_HOME", _DEFAULT_HOME))
DATA_PARTS = ["postgres", "dynamodb", "sqs", "s3", "spark"]
_USERS = Users(TEST_HOME.with_name(TEST_HOME.name + ".users"))

# The user's own settings must not steer the tests.
for _name in [name for name in os.environ if name.startswith(("LOCKSTEP_", "AWS_", "DAGSTER_", "PG"))]:
    if _name != "AWS_CA_BUNDLE":
        del os.environ[_name]
os.environ["LOCKSTEP_HOME"] = str(TEST_HOME)
if CLUSTERED:  # the same tests, with Spark as a master and two workers: make test-cluster
    os.environ["LOCKSTEP_SPARK_CLUSTER"] = "true"
os.environ["LOCKSTEP_SPARK_MEMORY"] = "2g"  # one server for hundreds of tests and their sessions
# Hundreds of databases come and go, and each would wait for the disk a dozen times. What a killed process wrote is
# kept by the operating system all the same; only a power cut would show the difference.
os.environ["LOCKSTEP_POSTGRES_OPTIONS"] = "fsync=off full_page_writes=off"
# Tests ask thousands of different questions about a handful of rows: compiling each and planning it anew in the middle
# would be most of the work. The demo, the benchmarks and the cluster's tests run with Spark's own settings.
if not CLUSTERED:
    os.environ["LOCKSTEP_SPARK_OPTIONS"] = (
        "spark.sql.shuffle.partitions=1 spark.databricks.delta.writeChecksumFile.enabled=false "
        "spark.sql.codegen.wholeStage=false spark.sql.codegen.factoryMode=NO_CODEGEN spark.sql.adaptive.enabled=false"
    )
# A test run is over before Java's second compiler has paid for itself: it would take a third of Spark's processor time.
# The size of the code cache is the usual one, which Java cuts to a fifth with one compiler: Spark would die of it.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--keep-stack` leaves the stack running for the next invocation."""
    parser.addoption("--keep-stack", action="store_true", help="do not stop the embedded stack at the end")


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The controlling process stops the stack; workers never do. One that another run uses is left to that run."""
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and not session.config.getoption("--keep-stack"):
        with _USERS.leave() as last:
            if last:
                _test_stack().down()


def _test_stack() -> Stack:
    from stack.lifecycle import Stack

    return Stack(load_settings(home=TEST_HOME))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the whole platform come last: until then no daemon and no service takes time from the others."""
    items.sort(key=lambda item: item.get_closest_marker("platform") is not None)


@pytest.fixture(scope="session")
def stack() -> Stack:
    """The embedded stack: its databases, queues, buckets and Spark are healthy."""
    return _up(DATA_PARTS)


@pytest.fixture(scope="session")
def platform(stack: Stack) -> Stack:
    """The same stack with Dagster and the services, for tests marked `platform`."""
    return _up(None)


def _up(parts: list[str] | None) -> Stack:
    from filelock import FileLock

    running = _test_stack()
    _USERS.join()
    with FileLock(str(TEST_HOME) + ".lock", timeout=600):
        try:
            running.running()
        except Exception:
            running.reset()  # a new run starts empty
        running.up(parts)
    return running


@pytest.fixture(autouse=True)
def _addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that use the stack find its addresses in the environment; all others find none."""
    if request.node.get_closest_marker("platform"):
        request.getfixturevalue("platform")
    if "stack" in request.fixturenames:
        running: Stack = request.getfixturevalue("stack")
        for name, value in running.site().environment.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _signals_as_usual() -> None:
    """Children inherit what is ignored or blocked, by a background shell or by an earlier test, and then do not end."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command called in a test sends the log to a stream that closes with it: the next test must not meet that.

    Nor structlog's own defaults, which a test of the log leaves behind: they print lines among a command's answers.
    """
    get_logger(__name__)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class FreshQueue(NamedTuple):
    """A queue that only one test uses."""

    name: str
    url: str


@pytest.fixture
def database(stack: Stack) -> Iterator[str]:
    """The address of an empty database, dropped afterwards."""
    with fresh_database(stack) as dsn:
        yield dsn


@pytest.fixture
def sqs(stack: Stack) -> Any:
    """A client of the stack's SQS."""
    return boto3.client("sqs")


@pytest.fixture
def dynamodb(stack: Stack) -> Any:
    """A client of the stack's DynamoDB."""
    return boto3.client("dynamodb")


@pytest.fixture
def s3(stack: Stack) -> Any:
    """A client of the stack's S3."""
    return boto3.client("s3")


@pytest.fixture
def queue(sqs: Any) -> Iterator[FreshQueue]:
    """A fresh queue, deleted afterwards."""
    name = f"test-{secrets.token_hex(6)}"
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    yield FreshQueue(name, url)
    sqs.delete_queue(QueueUrl=url)


@pytest.fixture
def bucket(s3: Any) -> str:
    """A fresh bucket; it goes away with the stack's home."""
    name = f"test-{secrets.token_hex(6)}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def spark(stack: Stack) -> Iterator[Any]:
    """A Spark Connect session on the stack's warm server."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(stack.site().environment["LOCKSTEP_SPARK_REMOTE"]).create()
    yield session
    session.stop()


@pytest.fixture
def home_folder() -> Iterator[Path]:
    """A folder for the home of a stack, beside the shared one.

    Not pytest's own: every pytest on the machine closes that one to other users when it starts, and as root the
    embedded PostgreSQL is such a user.
    """
    folder = TEST_HOME.with_name(".lockstep-small") / secrets.token_hex(4)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_home(home_folder: Path) -> Iterator[Path]:
    """A home for a second, small stack; whatever was started in it is stopped afterwards."""
    from stack.lifecycle import Stack

    home = home_folder / "home"
    yield home
    Stack(load_settings(home=home)).down()
