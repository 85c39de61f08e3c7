"""The jar cache heals itself: a file that is missing, cut short or altered is noticed by checksum and fetched again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.kernel.errors import LockstepError
from stack import jars


@pytest.fixture
def repository() -> Iterator[str]:
    """The real cache, served on loopback the way a Maven repository is."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(jars.cache_folder()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def cached(repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jars.Jar:
    """One real archive in a cache of its own."""
    from jgo.maven import MavenContext

    jar = min(jars.pinned("sqs"), key=lambda candidate: candidate.size)
    origin = jar.path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "pinned", lambda bundle: [jar])
    remote = {"loopback": repository}
    monkeypatch.setattr(
        jars,
        "_maven",
        lambda: MavenContext(repo_cache=jars.cache_folder(), local_repos=[], remote_repos=remote),
    )
    jar.path.parent.mkdir(parents=True)
    shutil.copyfile(origin, jar.path)
    return jar


def test_an_intact_cache_is_left_alone(cached: jars.Jar) -> None:
    assert jars.fetch(["sqs"]) == 0


@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_a_damaged_archive_is_detected_and_fetched_again(cached: jars.Jar, damage: str) -> None:
    content = cached.path.read_bytes()
    if damage == "gone":
        cached.path.unlink()
    else:
        cached.path.write_bytes(content[:50] if damage == "cut" else b"\0" * len(content))
    assert jars.damaged(["sqs"]) == [cached]
    assert jars.fetch(["sqs"]) == 1
    assert cached.path.read_bytes() == content


def test_an_archive_that_cannot_be_had_is_a_sentence_with_its_name(
    cached: jars.Jar, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jgo.maven import MavenContext

    monkeypatch.setattr(
        jars, "_maven", lambda: MavenContext(repo_cache=jars.cache_folder(), local_repos=[], remote_repos={})
    )
    cached.path.unlink()
    with pytest.raises(LockstepError, match=f"{cached.artifact}.*could not be"):
        jars.fetch(["sqs"])


def test_the_huge_aws_bundle_is_not_among_the_archives() -> None:
    """It is larger than everything else together; two of its modules suffice."""
    pinned = jars.pinned("spark")
    assert not [jar for jar in pinned if jar.artifact == "bundle"]
    assert sum(jar.size for jar in pinned) < 60e6
