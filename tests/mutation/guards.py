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
    "tests/property/idempotency/test_cleaner_postgres.py",
    "tests/integration/idempotency/test_cleaner.py",
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
        _CLEANER_TESTS[1:],
    ),
    Guard(
        "a frozen unit on Delta is closed",
        _CLEANER_DELTA,
        "if seen.frozen and day < date.fromisoformat(seen.frozen):",
        "if False:",
        _CLEANER_TESTS[1:],
    ),
    Guard(
        "rows of another day are refused on Delta",
        _CLEANER_DELTA,
        "THEN TRUE ELSE raise_error({words}) END",
        "THEN TRUE ELSE TRUE OR raise_error({words}) IS NULL END",
        _CLEANER_TESTS[1:],
    ),
    Guard(
        "an overwrite keeps to its unit",
        _OVERWRITE,
        "with _settings(spark, wanted), _outside_unit(path, predicate), delta.contested(path):",
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
    Guard(
        "a session that was opened again finds the rows that it checked",
        "lockstep/idempotency/delta.py",
        'before, place.session = getattr(place, "session", None), frame.sparkSession',
        'before = getattr(place, "session", None)',
        _MERGER_TESTS,
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

_RULES = "lockstep/windows/rules.py"
_STORE = "lockstep/windows/store.py"
_WORKER = "lockstep/windows/worker.py"
_DRAIN_TESTS = ("tests/integration/windows/test_drain.py",)
_LEDGER = "lockstep/windows/ledger.py"
_REDSHIFT = "lockstep/warehouse/redshift.py"
_REDSHIFT_TESTS = (
    "tests/integration/warehouse/test_redshift_lane.py",
    "tests/integration/warehouse/test_redshift_on_postgres.py",
)

WINDOWS: tuple[Guard, ...] = (
    Guard(
        "a drain does not step over a hole",
        _RULES,
        "if len(chain) == limit or row.window.start != watermark or row.status is WindowStatus.FAILED:",
        "if len(chain) == limit or row.status is WindowStatus.FAILED:",
        ("tests/property/windows/test_rules.py",),
    ),
    Guard(
        "a drain ends before a failed window",
        _RULES,
        "row.window.start != watermark or row.status is WindowStatus.FAILED:",
        "row.window.start != watermark:",
        ("tests/property/windows/test_rules.py",),
    ),
    Guard(
        "a window is applied only by the fence that holds its lane",
        _STORE,
        "            self._check_guard(guard, claim)\n            counts = moves.counts(staged.window)\n"
        '            values |= {"counts": Jsonb(counts), "rows": _changed(counts)}\n            recorded',
        "            counts = moves.counts(staged.window)\n"
        '            values |= {"counts": Jsonb(counts), "rows": _changed(counts)}\n            recorded',
        ("tests/integration/windows/test_store.py",),
    ),
    Guard(
        "a window that does not start at the watermark changes nothing",
        _STORE,
        "            if advanced.rowcount != 1:\n                raise _lost(claim.vault, claim.fence)\n"
        '            values["applied_at"]',
        '            values["applied_at"]',
        ("tests/integration/windows/test_store.py",),
    ),
    Guard(
        "fewer staged rows than the manifest announces are noticed",
        _STORE,
        "            if present != wanted:\n",
        "            if False:\n",
        ("tests/integration/windows/test_store.py",),
    ),
    Guard(
        "a lost answer is looked up before anything is repeated",
        _WORKER,
        "            if found is None:\n                raise\n            return found\n",
        "            raise\n",
        _DRAIN_TESTS,
    ),
    Guard(
        "a healed window is fetched again before it is retried",
        _WORKER,
        "        chain[0] = self._worker.as_offered(chain[0])\n",
        "",
        ("tests/integration/windows/test_recovery.py",),
    ),
    Guard(
        "a zombie's queue write loses against a newer fence",
        _LEDGER,
        " AND (attribute_not_exists(fence) OR fence <= :fence)",
        "",
        ("tests/faults/windows/test_kills.py::test_a_zombie_cannot_write_the_queue_over_a_newer_worker",),
    ),
    Guard(
        "a stale worker writes nothing to Redshift",
        _REDSHIFT,
        '"WHERE vault = %(vault)s AND fence = %(fence)s AND epoch = %(epoch)s"\n)\n_ADVANCE',
        '"WHERE vault = %(vault)s"\n)\n_ADVANCE',
        _REDSHIFT_TESTS,
    ),
)

_SILVER = "lockstep/ticks/silver/"
_SILVER_TESTS = ("tests/integration/silver/test_worker.py", "tests/unit/silver/test_rules.py")

SILVER: tuple[Guard, ...] = (
    Guard(
        "a lane goes on without waiting for messages that are hidden",
        f"{_SILVER}intake.py",
        "{project: [] for project in also}",
        "{}",
        ("tests/integration/silver/test_intake.py",),
    ),
    Guard(
        "a zombie's merge is dropped by Delta",
        f"{_SILVER}tables.py",
        "with delta.commit_as(self._spark, app=app, app_version=version):",
        "with delta.commit_as(self._spark):",
        _SILVER_TESTS,
    ),
    Guard(
        "a zombie's overwrite is dropped by Delta",
        f"{_SILVER}tables.py",
        'options={"txnAppId": app, "txnVersion": str(version)},',
        "options={},",
        _SILVER_TESTS,
    ),
    Guard(
        "the watermark moves only over the next tick of this generation",
        f"{_SILVER}store.py",
        "if connection.execute(_ADVANCE, base).rowcount != 1:",
        "if connection.execute(_ADVANCE, base).rowcount > 1:",
        _SILVER_TESTS,
    ),
    Guard(
        "an expired dispatch is not believed",
        f"{_SILVER}dispatch.py",
        'if int(item["expires_at"]["N"]) > now.timestamp()}',
        "}",
        _SILVER_TESTS,
    ),
    Guard(
        "a lease from the future is not waited for",
        f"{_SILVER}dispatch.py",
        '" AND (lease_until <= :now OR lease_until > :longest)"',
        '" AND (lease_until <= :now OR lease_until > :longest) AND lease_until <= :now"',
        ("tests/integration/silver/test_intake.py",),
    ),
    Guard(
        "a hint from the future is not believed",
        f"{_SILVER}store.py",
        '"ahead": now + again_after}',
        '"ahead": now + again_after * 1000}',
        ("tests/integration/silver/test_intake.py",),
    ),
    Guard(
        "a tick does not overtake the one before it",
        f"{_SILVER}rules.py",
        "while (tick := by_number.get(lane.watermark + len(ready) + 1)) is not None:",
        "for tick in by_number.values():",
        _SILVER_TESTS,
    ),
    Guard(
        "a replay goes back before it merges",
        f"{_SILVER}tables.py",
        "outcome = stateful.run_merge(table, run) if step.must_go_back else stateful.run_forward(table, run)",
        "outcome = stateful.run_forward(table, run)",
        _SILVER_TESTS,
    ),
    Guard(
        "attempts of workers that died are counted",
        f"{_SILVER}worker.py",
        "if row.attempt > MAX_ATTEMPTS:",
        "if False:",
        _SILVER_TESTS,
    ),
)

_UNIT = "tests/unit/readiness"
_READINESS = "lockstep/readiness"

READINESS: tuple[Guard, ...] = (
    Guard(
        "an execution is written by version",
        f"{_READINESS}/store.py",
        'return Put(item, Absent() if before is None else Equals("version", before.version))',
        "return Put(item)",
        (f"{_UNIT}/test_driver.py", "tests/property/readiness/test_drivers.py"),
    ),
    Guard(
        "a marker is kept until it is heard",
        f"{_READINESS}/worker.py",
        "if marker.key in settled or marker.key.pipeline not in plans:",
        "if True:",
        (f"{_UNIT}/test_markers.py",),
    ),
    Guard(
        "a late arrival that is told twice is one",
        f"{_READINESS}/rules.py",
        "if state.late_seen is not None and event.at <= state.late_seen:",
        "if False:",
        (f"{_UNIT}/test_markers.py",),
    ),
    Guard(
        "a deployment does not open the day before it",
        f"{_READINESS}/timing.py",
        "if active <= now and (begin is None or active >= begin):",
        "if active <= now:",
        (f"{_UNIT}/test_deployment.py",),
    ),
    Guard(
        "a tick ends although an evaluator hangs",
        f"{_READINESS}/worker.py",
        "wait(waiting, timeout=max(0.0, deadline - self._clock.monotonic()))",
        "wait(waiting)",
        (f"{_UNIT}/test_driver.py",),
    ),
    Guard(
        "an answer for a try that is over decides nothing",
        f"{_READINESS}/rules.py",
        "if event.run_id != state.run_id or state.status is not _RUNNING:",
        "if state.status is not _RUNNING:",
        (f"{_UNIT}/test_traps.py", f"{_UNIT}/test_transitions.py"),
    ),
    Guard(
        "a push goes before an evaluator",
        f"{_READINESS}/store.py",
        "return min(valid, key=lambda result: not result.pushed, default=None)",
        "return min(valid, key=lambda result: result.pushed, default=None)",
        (f"{_UNIT}/test_cli.py",),
    ),
    Guard(
        "an alert is raised once",
        f"{_READINESS}/store.py",
        "return self._table.write([Put(lock, Free(seconds(now))), event, kept])",
        "return self._table.write([Put(lock), event, kept])",
        (f"{_UNIT}/test_alerts.py",),
    ),
    Guard(
        "an alert whose sender died is sent",
        f"{_READINESS}/watchdog.py",
        "                    self._plane.alerts.deliver(alert)\n",
        "                    pass\n",
        (f"{_UNIT}/test_alerts.py",),
    ),
    Guard(
        "the address that was checked is the one that is called",
        f"{_READINESS}/safety.py",
        "        request.url = request.url.copy_with(host=addresses[0])\n",
        "",
        (f"{_UNIT}/test_evaluators.py",),
    ),
    Guard(
        "a redirect is not followed",
        f"{_READINESS}/safety.py",
        "follow_redirects=False",
        "follow_redirects=True",
        (f"{_UNIT}/test_safety.py",),
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

GUARDS: tuple[Guard, ...] = IDEMPOTENCY + WINDOWS + SILVER + READINESS + TICKS
