"""The Java archives of the embedded parts: which, where they are cached, and how a damaged one is replaced.

`jars.lock` beside this file pins every archive by coordinate, size and SHA-256; it is written by
`python -m stack.jars lock` and read by everything else. Nothing here starts a process; see parts.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.kernel.errors import InvalidInput, Transient

LOCK_FILE = Path(__file__).with_name("jars.lock")

# What PySpark already ships, or what hadoop-aws asks for and never loads on our paths. The AWS `bundle` alone is
# larger than everything else together; the s3 and s3-transfer-manager modules are what s3a really needs.
_SHIPPED_WITH_SPARK = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "software.amazon.awssdk:bundle",
    "org.wildfly.openssl:wildfly-openssl",
    "org.apache.logging.log4j:*",
    "org.scala-lang:*",
    "org.slf4j:*",
    "io.netty:*",
    "org.apache.parquet:*",
    "com.fasterxml.jackson.core:*",
    "com.github.luben:zstd-jni",
    "org.xerial.snappy:snappy-java",
    "org.locationtech.jts:*",
    "org.roaringbitmap:*",
    "org.apache.httpcomponents:*",
    "commons-codec:commons-codec",
    "commons-logging:commons-logging",
    "org.apache.commons:commons-pool2",
    "io.airlift:*",
    "org.checkerframework:*",
    "com.google.code.findbugs:*",
)


@dataclass(frozen=True)
class Bundle:
    """What one part needs: its root coordinates and how their versions are chosen."""

    roots: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    # S3Proxy mixes Jackson versions when every version is pinned as declared, and then dies at start.
    pin_declared_versions: bool = True


BUNDLES = {
    "dynamodb": Bundle(("com.amazonaws:DynamoDBLocal:2.6.1",)),
    "sqs": Bundle(("org.elasticmq:elasticmq-server_3:1.7.1",)),
    "s3": Bundle(("org.gaul:s3proxy:4.1.0",), pin_declared_versions=False),
    "spark": Bundle(
        (
            "io.delta:delta-spark_4.2_2.13:4.4.0",
            "org.apache.hadoop:hadoop-aws:3.5.0",
            "org.postgresql:postgresql:42.7.8",
            "software.amazon.awssdk:s3:2.35.4",
            "software.amazon.awssdk:s3-transfer-manager:2.35.4",
        ),
        excluded=_SHIPPED_WITH_SPARK,
    ),
}


class Jar(NamedTuple):
    """One pinned archive."""

    group: str
    artifact: str
    version: str
    classifier: str
    packaging: str
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the archive lives in the cache, whether or not it is there."""
        suffix = f"-{self.classifier}" if self.classifier else ""
        name = f"{self.artifact}-{self.version}{suffix}.{self.packaging}"
        return cache_folder().joinpath(*self.group.split("."), self.artifact, self.version, name)

    @property
    def label(self) -> str:
        """The coordinate as a person writes it."""
        return f"{self.group}:{self.artifact}:{self.version}"


def cache_folder() -> Path:
    """The user's cache folder for archives, shared by every clone."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lockstep" / "jars"


def pinned(bundle: str) -> list[Jar]:
    """The archives of a part, in class-path order."""
    return [Jar(*row) for row in json.loads(LOCK_FILE.read_text())[bundle]]


def classpath(bundle: str) -> list[Path]:
    """The `.jar` files of a part. DynamoDB's native libraries are no class-path entries; see native_folder."""
    return [jar.path for jar in pinned(bundle) if jar.packaging == "jar"]


def spark_classpath() -> list[Path]:
    """Delta, s3a and the Postgres driver, which Spark does not ship."""
    return classpath("spark")


def is_intact(jar: Jar) -> bool:
    """Whether the cached file is the pinned one, to the byte."""
    path = jar.path
    if not path.is_file() or path.stat().st_size != jar.size:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == jar.sha256


def damaged(bundles: Iterable[str] = BUNDLES) -> list[Jar]:
    """The archives that are missing, cut short or altered."""
    jars = {jar.path: jar for bundle in bundles for jar in pinned(bundle)}
    with ThreadPoolExecutor(4) as pool:
        intact = pool.map(is_intact, jars.values())
    return [jar for jar, good in zip(jars.values(), intact, strict=True) if not good]


def fetch(bundles: Iterable[str] = BUNDLES, *, report: Callable[[int, int], None] | None = None) -> int:
    """Bring the cache to the pinned state and return how many archives were downloaded."""
    wanted = damaged(bundles)
    if not wanted:
        return 0
    context = _maven()
    with ThreadPoolExecutor(8) as pool:
        for done, _ in enumerate(pool.map(lambda jar: _download(context, jar), wanted), start=1):
            if report:
                report(done, len(wanted))
    return len(wanted)


def _download(context: object, jar: Jar) -> None:
    jar.path.unlink(missing_ok=True)  # jgo takes whatever file is in its cache, also half of one
    component = context.project(jar.group, jar.artifact).at_version(jar.version)
    try:
        component.artifact(jar.classifier, jar.packaging).resolve()
    except OSError as error:
        raise Transient(
            f"{jar.label} could not be downloaded: {error}",
            next_step="check the network and the free disk space, then run `make setup` again.",
        ) from error
    except Exception as error:
        raise Transient(
            f"{jar.label} could not be resolved: {error}",
            next_step="check the network, then run `make setup` again.",
        ) from error
    if not is_intact(jar):
        jar.path.unlink(missing_ok=True)
        raise InvalidInput(
            f"{jar.label} does not match its pinned checksum.",
            next_step="a proxy may have altered the download; try another network.",
        )


def _maven() -> object:
    from jgo.maven import MavenContext

    return MavenContext(repo_cache=cache_folder(), timeout=60)


def _excluded(context: object, patterns: Iterable[str]) -> list[object]:
    return [context.project(*pattern.split(":")) for pattern in patterns]


def resolve(bundle: str) -> list[Jar]:
    """Resolve a part's archives from their root coordinates (used only to write the lock)."""
    wanted = BUNDLES[bundle]
    context = _maven()
    pin = "!" if wanted.pin_declared_versions else ""
    roots = [context.create_dependency(root + pin, _excluded(context, wanted.excluded)) for root in wanted.roots]
    inputs, transitive = context.resolver.resolve(roots)
    # The inputs carry no scope: filtering them by scope would silently drop the root archives.
    needed = [*inputs, *(dep for dep in transitive if dep.scope in ("compile", "runtime"))]
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda dep: dep.artifact.resolve(), needed))
    return [_pin(dep.artifact, path) for dep, path in zip(needed, paths, strict=True)]


def _pin(artifact: object, path: Path) -> Jar:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    names = (
        artifact.groupId,
        artifact.artifactId,
        artifact.version,
        artifact.classifier or "",
        artifact.packaging,
    )
    jar = Jar(*names, path.stat().st_size, digest)
    if jar.path != path:
        raise InvalidInput(f"{jar.label} was cached at an unexpected place.", next_step="update Jar.path.")
    return jar


def write_lock() -> None:
    """Resolve every bundle anew and pin the result."""
    rows = {bundle: [list(jar) for jar in resolve(bundle)] for bundle in BUNDLES}
    body = ",\n".join(
        f' "{bundle}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in jars) + "\n ]"
        for bundle, jars in rows.items()
    )
    LOCK_FILE.write_text("{\n" + body + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        write_lock()
    else:
        print(f"{fetch()} archives downloaded")
