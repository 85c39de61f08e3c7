"""The table of guards: what protects the data, how it is taken out, and which tests must notice.

What belongs here: one entry for each guard whose loss would be silent. What does not: running them (`test_guards.py`).
A fragment of source is replaced in a copy of the tree, so an entry is also a place to look at when one asks why a line
is there.
"""

from __future__ import annotations

from typing import NamedTuple


class Guard(NamedTuple):
    """One guard. `text` occurs once in `file`; `instead` is the code without it; `tests` are paths or node ids."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


_CLEANER = "lockstep/idempotency/cleaner.py"
_CLEANER_TESTS = (
    "tests/integration/idempotency/test_cleaner.py",
    "tests/property/idempotency/test_cleaner_postgres.py",
)
_CLEANER_DELTA = "lockstep/idempotency/cleaner_delta.py"
_OVERWRITE = "lockstep/idempotency/overwrite.py"
_OVERWRITE_TESTS = ("tests/integration/idempotency/test_overwrite.py",)
_UNCHECKED = "spark.databricks.delta.replaceWhere.constraintCheck.enabled"
_FILES_TESTS = (*_OVERWRITE_TESTS, "tests/property/idempotency/test_overwrite_files.py")
_POINTER = "lockstep/idempotency/pointer.py"
_WRITER = "lockstep/idempotency/transactional.py"
_WRITER_TESTS = (
    "tests/property/idempotency/test_transactional_postgres.py",
    "tests/integration/idempotency/test_transactional.py",
    "tests/unit/idempotency/test_transactional_delta.py",
)
_PROXY = "lockstep/idempotency/proxy.py"
_PROXY_TESTS = (
    "tests/unit/idempotency/test_proxy_rules.py",
    "tests/property/idempotency/test_proxy_postgres.py",
    "tests/integration/idempotency/test_proxy.py",
)
_PROXY_S3 = "lockstep/idempotency/proxy_s3.py"
_MERGER = "lockstep/idempotency/merger.py"
_MERGER_TESTS = ("tests/property/idempotency/test_merger.py", "tests/integration/idempotency/test_merger.py")
_KEYED = "lockstep/idempotency/keyed.py"
_KEYED_TESTS = ("tests/unit/idempotency/test_keyed.py", "tests/integration/idempotency/test_keyed.py")

IDEMPOTENCY: tuple[Guard, ...] = (
    Guard(
        "a late retry of a unit's first day does not clean the days after it",
        _CLEANER,
        "if done is not None and done[0] == run:",
        "if False:",
        _CLEANER_TESTS,
    ),
    Guard(
        "a day inside a unit is not loaded twice",
        _CLEANER,
        "    if loaded_before:\n",
        "    if False:\n",
        _CLEANER_TESTS,
    ),
    Guard("a frozen unit is closed", _CLEANER, "        if unit.frozen:\n", "        if False:\n", _CLEANER_TESTS),
    Guard(
        "a changed grain is refused",
        _CLEANER,
        "if (unit.starts, unit.ends) != interval:",
        "if False:",
        _CLEANER_TESTS,
    ),
    Guard(
        "rows of another day are refused",
        _CLEANER,
        "if found is None or found[0] != rows:",
        "if False:",
        _CLEANER_TESTS,
    ),
    Guard("the number of units is bounded", _CLEANER, "if count >= dataset.quota:", "if False:", _CLEANER_TESTS),
    Guard(
        "a unit on Delta recognises its own run",
        _CLEANER_DELTA,
        "if _name(run, day) in seen.runs:",
        "if False:",
        _CLEANER_TESTS[:1],
    ),
    Guard(
        "a frozen unit on Delta is closed",
        _CLEANER_DELTA,
        "if seen.frozen and day < date.fromisoformat(seen.frozen):",
        "if False:",
        _CLEANER_TESTS[:1],
    ),
    Guard(
        "rows of another day are refused on Delta",
        _CLEANER_DELTA,
        "THEN TRUE ELSE raise_error({words}) END",
        "THEN TRUE ELSE TRUE OR raise_error({words}) IS NULL END",
        _CLEANER_TESTS[:1],
    ),
    Guard(
        "an overwrite keeps to its unit",
        _OVERWRITE,
        "with _settings(spark, wanted), _outside_unit(path, predicate):",
        f"with _settings(spark, wanted | {{'{_UNCHECKED}': 'false'}}):",
        _OVERWRITE_TESTS,
    ),
    Guard(
        "a session's dynamic overwrite does not turn off the clearing of empty units",
        _OVERWRITE,
        "with _settings(spark, wanted), _outside_unit",
        "with _settings(spark, {}), _outside_unit",
        _OVERWRITE_TESTS,
    ),
    Guard(
        "a predicate of nothing does not mean everything",
        _OVERWRITE,
        "    if not predicate.strip():\n",
        "    if False:\n",
        _OVERWRITE_TESTS,
    ),
    Guard(
        "files of an attempt under way are not swept",
        _OVERWRITE,
        'if found is None or found.content["base"] == current:',
        "if found is None:",
        _FILES_TESTS,
    ),
    Guard(
        "an overtaken attempt publishes no files",
        _POINTER,
        'ContentType="application/json", IfMatch=seen.etag)',
        'ContentType="application/json")',
        _FILES_TESTS,
    ),
    Guard(
        "two first attempts do not both publish",
        _POINTER,
        'ContentType="application/json", IfNoneMatch="*")',
        'ContentType="application/json")',
        _FILES_TESTS,
    ),
    Guard(
        "a lost answer of our own is no lost claim",
        _POINTER,
        "if now is None or now.content != content:",
        "if True:",
        (*_FILES_TESTS, *_PROXY_TESTS),
    ),
    Guard(
        "one writer at a time for each unit",
        _WRITER,
        'connection.execute(_LOCK_UNIT, (f"{key.pipeline}/{key.unit}",))',
        "pass",
        _WRITER_TESTS,
    ),
    Guard(
        "an older generation comes too late",
        _WRITER,
        "if newer is not None and newer[0] is not None:",
        "if False:",
        _WRITER_TESTS,
    ),
    Guard(
        "other rows under an applied key are refused",
        _WRITER,
        "if done[1].content != staging.content:",
        "if False:",
        _WRITER_TESTS,
    ),
    Guard(
        "staged rows are counted before they are applied",
        _WRITER,
        "_check_staged(connection, staging, key)\n            how(",
        "how(",
        _WRITER_TESTS,
    ),
    Guard("a replay does not append", _WRITER, "if key.generation != 1:", "if False:", _WRITER_TESTS),
    Guard(
        "rows of another unit are not applied",
        _WRITER,
        "        _refuse_strangers(connection, key, staging, column)\n",
        "",
        _WRITER_TESTS,
    ),
    Guard(
        "rows without a receipt do not count",
        _WRITER,
        '"ON s._partition = receipt.p AND s._attempt = receipt.a) AS staged"',
        '"ON s._partition = receipt.p) AS staged"',
        _WRITER_TESTS,
    ),
    Guard(
        "an older date does not publish over a newer one",
        _PROXY,
        "return Decision.OLDER if wanted.logical_date < current.logical_date else Decision.MOVE",
        "return Decision.MOVE",
        _PROXY_TESTS,
    ),
    Guard(
        "a retry does not undo a roll back",
        _PROXY,
        "if any(past.name == wanted.name for past in moves):",
        "if False:",
        _PROXY_TESTS,
    ),
    Guard(
        "a retry builds no second version",
        _PROXY,
        "        if known is not None:\n            return Version(*known)\n",
        "",
        _PROXY_TESTS,
    ),
    Guard("old versions are sealed", _PROXY, "        _seal(connection, table, version.name)\n", "", _PROXY_TESTS),
    Guard(
        "a version without objects is not shown",
        _PROXY_S3,
        "if not any(self._objects(self.folder(version))):",
        "if False:",
        _PROXY_TESTS,
    ),
    Guard(
        "an increment that contradicts itself is refused",
        _MERGER,
        "contract.refuse(_counts(work, contract, source), unit=target)",
        "pass",
        _MERGER_TESTS,
    ),
    Guard(
        "a late replay does not bring a deleted row back",
        _MERGER,
        "            work.execute(_sql(postgres_tombstones(contract, source, tombstones)))\n",
        "            pass\n",
        _MERGER_TESTS,
    ),
    Guard(
        "a merge without memory of deletes is refused",
        _MERGER,
        "if contract.needs_tombstones and tombstones is None:",
        "if False:",
        (*_MERGER_TESTS, "tests/unit/idempotency/test_merger_text.py"),
    ),
    Guard("a taken key is not overwritten", _KEYED, "    if not replace:\n", "    if False:\n", _KEYED_TESTS),
    Guard(
        "a replaced object is the one that was read",
        _KEYED,
        'IfMatch=found["ETag"]):',
        "):",
        _KEYED_TESTS,
    ),
    Guard(
        "a key is written once",
        _KEYED,
        'if _put(s3, bucket, key, body, digest, IfNoneMatch="*"):',
        "if _put(s3, bucket, key, body, digest):",
        _KEYED_TESTS,
    ),
)

_FINALIZE_TESTS = "tests/integration/ticks/test_finalize.py"
_PARTS_TESTS = "tests/integration/ticks/test_parts.py"
_FAILURES = "tests/faults/ticks/test_failure_table.py"

TICKS: tuple[Guard, ...] = (
    Guard(
        "other data under a committed tick's id is refused",
        "lockstep/ticks/worker.py",
        "if known.manifest_sha256 != manifest.sha256:",
        "if False:",
        (f"{_FINALIZE_TESTS}::test_another_manifest_for_a_committed_tick_is_422_and_changes_nothing",),
    ),
    Guard(
        "a tick that may have rows in bronze is replaced, not appended",
        "lockstep/ticks/store.py",
        "fresh = connection.execute(_ATTEMPT, _manifest_keys(manifest)).rowcount == 1",
        "fresh = True",
        (f"{_FAILURES}::test_a_finalize_that_dies_anywhere_is_finished_by_the_next_one",),
    ),
    Guard(
        "an answer waits for its messages",
        "lockstep/ticks/worker.py",
        "if self._plant.store.undelivered(tick):",
        "if False:",
        (f"{_FAILURES}::test_a_tick_whose_messages_cannot_leave_is_not_acknowledged_and_not_lost",),
    ),
    Guard(
        "bytes that are not the announced ones are not stored",
        "services/ingest/routes.py",
        "if body.sha256 != sha256:",
        "if False:",
        (f"{_PARTS_TESTS}::test_a_body_needs_its_length_its_digest_and_some_bytes",),
    ),
    Guard(
        "a secret opens its own project only",
        "services/ingest/routes.py",
        'if request.path_params.get("project_id") != project.project_id:',
        "if False:",
        (f"{_PARTS_TESTS}::test_credentials_are_401_and_other_projects_404",),
    ),
    Guard(
        "a tick does not overtake the one that it follows",
        "lockstep/ticks/rules.py",
        "if wanted_prev is None or wanted_prev == head:",
        "if True:",
        ("tests/unit/ticks/test_rules.py", f"{_FINALIZE_TESTS}::test_a_tick_waits_for_the_one_before_it"),
    ),
)

GUARDS: tuple[Guard, ...] = IDEMPOTENCY + TICKS
