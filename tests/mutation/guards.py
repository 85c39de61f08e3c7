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


_BLOCKS = "lockstep/idempotency"
_IN_UNIT, _IN_STORES = "tests/unit/idempotency", "tests/integration/idempotency"
_UNCHECKED = "spark.databricks.delta.replaceWhere.constraintCheck.enabled"

_CLEANER = f"{_BLOCKS}/cleaner.py"
_CLEANER_TESTS = (f"{_IN_STORES}/test_cleaner.py",)
_CLEANER_DELTA = f"{_BLOCKS}/cleaner_delta.py"
_CLEANER_DELTA_LOG = (f"{_IN_UNIT}/test_cleaner_delta_log.py",)
_UNITS_ON_DELTA = (f"{_IN_STORES}/test_cleaner.py::TestDelta",)

CLEANER: tuple[Guard, ...] = (
    Guard(
        "a late retry of a unit's first day does not clean the days after it",
        _CLEANER,
        "        if done is not None:\n            return Loaded(",
        "        if False:\n            return Loaded(",
        _CLEANER_TESTS,
    ),
    Guard(
        "days that went with their unit may come again",
        _CLEANER,
        "        connection.execute(_FORGET_RUNS, (_key(dataset), *interval, day))\n",
        "",
        _CLEANER_TESTS,
    ),
    Guard(
        "a day inside a unit is not loaded twice",
        _CLEANER,
        "if connection.execute(_IS_LOADED, (_key(dataset), day)).fetchone() is not None:",
        "if False:",
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
        "a unit under way is not frozen",
        _CLEANER,
        "if unit.frozen or unit.ends > before:",
        "if unit.frozen:",
        (f"{_IN_UNIT}/test_frozen_groups.py",),
    ),
    Guard(
        "units with a gap between them are not merged",
        _CLEANER,
        "last.ends == unit.starts and into.interval",
        "into.interval",
        (f"{_IN_UNIT}/test_frozen_groups.py",),
    ),
    Guard(
        "views on a unit itself are not cascaded away",
        _CLEANER,
        'sql.SQL("DROP TABLE {}").format(_table(dataset, name))',
        'sql.SQL("DROP TABLE {} CASCADE").format(_table(dataset, name))',
        _CLEANER_TESTS,
    ),
    Guard(
        "names are not cut off",
        "lockstep/kernel/postgres.py",
        "if len(name.encode()) > room:",
        "if False:",
        (f"{_IN_UNIT}/test_long_names.py",),
    ),
    Guard(
        "one load at a time for a dataset",
        _CLEANER,
        "        _lock(connection, dataset)\n        done =",
        "        done =",
        (f"{_CLEANER_TESTS[0]}::test_two_units_that_are_loaded_at_once_are_both_in_the_view",),
    ),
    Guard(
        "a unit on Delta recognises its own run",
        _CLEANER_DELTA,
        "if (done := seen.work.loads.get(_name(run, day))) is not None:",
        "if (done := seen.work.loads.get(_name(run, day))) is not None and False:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "an empty first day leaves a commit for its late retry",
        _CLEANER_DELTA,
        "with delta.settings(spark, delta.RECORD_EMPTY):\n        return overwrite_delta",
        "if True:\n        return overwrite_delta",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "a frozen unit on Delta is closed",
        _CLEANER_DELTA,
        "if seen.frozen and day < seen.frozen:",
        "if False:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "what is frozen on Delta stays frozen",
        _CLEANER_DELTA,
        "if frozen is None or frozen < mark:",
        "if True:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "the number of units on Delta is bounded",
        _CLEANER_DELTA,
        "not in starts and len(starts) >= dataset.quota:",
        "not in starts and False:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "rows of another day are refused on Delta",
        _CLEANER_DELTA,
        "THEN TRUE ELSE raise_error({words}) END",
        "THEN TRUE ELSE TRUE OR raise_error({words}) IS NULL END",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "a late retry of a clean does not clean what was loaded since",
        _CLEANER_DELTA,
        "if (run, starts) in seen.work.cleans:",
        "if False:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "retention rewrites no rows",
        _CLEANER_DELTA,
        'if day not in detail["partitionColumns"]:',
        "if False:",
        _UNITS_ON_DELTA,
    ),
    Guard(
        "a cleaned unit may be loaded again",
        _CLEANER_DELTA,
        "Work(_without(work.loads, delta.equality({UNIT: unit})), ",
        "Work(work.loads, ",
        _CLEANER_DELTA_LOG,
    ),
    Guard(
        "a restored table may be loaded again",
        _CLEANER_DELTA,
        'if commit.operation == "RESTORE":',
        "if False:",
        _CLEANER_DELTA_LOG,
    ),
    Guard(
        "days that went with their unit on Delta may come again",
        _CLEANER_DELTA,
        '**_without(work.loads, f"{one.predicate} AND")',
        "**work.loads",
        _CLEANER_DELTA_LOG,
    ),
)

_OVERWRITE = f"{_BLOCKS}/overwrite.py"
_OVERWRITE_TESTS = (f"{_IN_STORES}/test_overwrite.py",)
_POINTER = f"{_BLOCKS}/pointer.py"
_DELTA = f"{_BLOCKS}/delta.py"
_DELTA_TEXT = (f"{_IN_UNIT}/test_delta_text.py",)
_DELTA_CONFLICTS = (f"{_IN_UNIT}/test_delta_conflicts.py",)

OVERWRITE: tuple[Guard, ...] = (
    Guard(
        "an overwrite keeps to its unit",
        _OVERWRITE,
        "with delta.settings(spark, wanted), _outside_unit(path, predicate), delta.contested(path):",
        f"with delta.settings(spark, wanted | {{'{_UNCHECKED}': 'false'}}):",
        (f"{_OVERWRITE_TESTS[0]}::test_a_write_that_fails_or_strays_leaves_the_old_rows_readable",),
    ),
    Guard(
        "a session's own settings do not turn off the check",
        _OVERWRITE,
        "with delta.settings(spark, wanted), _outside_unit",
        "with delta.settings(spark, {}), _outside_unit",
        (f"{_OVERWRITE_TESTS[0]}::test_a_write_that_fails_or_strays_leaves_the_old_rows_readable",),
    ),
    Guard(
        "a predicate of nothing does not mean everything",
        _OVERWRITE,
        "    if not predicate.strip():\n",
        "    if False:\n",
        (f"{_OVERWRITE_TESTS[0]}::test_a_unit_without_a_predicate_is_refused",),
    ),
    Guard(
        "files of an attempt under way are not swept",
        _OVERWRITE,
        'if found is None or found.content["base"] == current:',
        "if found is None:",
        (f"{_OVERWRITE_TESTS[0]}::test_sweeping_removes_losers_and_spares_readers_neighbours_and_attempts_under_way",),
    ),
    Guard(
        "files that a reader may still follow are not swept",
        _OVERWRITE,
        "if seen is None or _manifest(seen.content).published_at >= superseded_before:",
        "if seen is None:",
        (f"{_OVERWRITE_TESTS[0]}::test_sweeping_removes_losers_and_spares_readers_neighbours_and_attempts_under_way",),
    ),
    Guard(
        "the files that readers follow are not swept",
        _OVERWRITE,
        "for note in notes if note not in kept)",
        "for note in notes)",
        (f"{_OVERWRITE_TESTS[0]}::test_sweeping_removes_losers_and_spares_readers_neighbours_and_attempts_under_way",),
    ),
    Guard(
        "files of a unit below are not swept",
        _OVERWRITE,
        'if key.endswith(_NOTE) and "/" not in key.removeprefix(staging):',
        "if key.endswith(_NOTE):",
        (f"{_OVERWRITE_TESTS[0]}::test_sweeping_removes_losers_and_spares_readers_neighbours_and_attempts_under_way",),
    ),
    Guard(
        "a unit cannot leave its folder",
        _OVERWRITE,
        '    if any(not part or part in (".", "..") or part.startswith("_") for part in parts):\n',
        "    if False and parts:\n",
        (f"{_OVERWRITE_TESTS[0]}::test_a_name_that_could_leave_its_folder_is_no_unit",),
    ),
    Guard(
        "an overtaken attempt publishes no files",
        _POINTER,
        'ContentType="application/json", IfMatch=seen.etag)',
        'ContentType="application/json")',
        (f"{_IN_STORES}/test_proxy.py::test_two_publishers_at_one_moment_have_one_winner",),
    ),
    Guard(
        "two first attempts do not both publish",
        _POINTER,
        'ContentType="application/json", IfNoneMatch="*")',
        'ContentType="application/json")',
        (f"{_OVERWRITE_TESTS[0]}::test_an_overtaken_worker_publishes_nothing",),
    ),
    Guard(
        "a lost answer of our own is no lost claim",
        _POINTER,
        "if now is None or now.content != content:",
        "if True:",
        (f"{_OVERWRITE_TESTS[0]}::test_a_publication_whose_answer_was_lost_is_recognised",),
    ),
    Guard(
        "a publication that is repeated later is no lost claim",
        _OVERWRITE,
        "if shown is None or shown.folder != staged.folder:",
        "if True:",
        (f"{_OVERWRITE_TESTS[0]}::test_a_publication_that_is_repeated_later_is_recognised",),
    ),
    Guard(
        "an overtaken attempt does not pass for its winner",
        _OVERWRITE,
        "if shown is None or shown.folder != staged.folder:",
        "if shown is None:",
        (f"{_OVERWRITE_TESTS[0]}::test_an_overtaken_worker_publishes_nothing",),
    ),
    Guard(
        "an address cannot leave its backticks",
        _DELTA,
        'return "`" + name.replace("`", "``") + "`"',
        'return "`" + name + "`"',
        _DELTA_TEXT,
    ),
    Guard(
        "a text cannot leave its quotes",
        _DELTA,
        '.replace("\'", "\\\\\'")',
        "",
        _DELTA_TEXT,
    ),
    Guard(
        "a time without a zone is no literal",
        _DELTA,
        "if isinstance(value, datetime) and value.tzinfo is not None:",
        "if isinstance(value, datetime):",
        _DELTA_TEXT,
    ),
    Guard(
        "a partition of NULL is asked for with IS NULL",
        _DELTA,
        'f"{column(name)} IS NULL" if value is None else f"{column(name)} = {literal(value)}"',
        'f"{column(name)} = {literal(value)}"',
        _DELTA_TEXT,
    ),
    Guard(
        "a commit that lost against another writer may be tried again",
        _DELTA,
        "if _CONTESTED.search(str(error)) is None:",
        "if True:",
        _DELTA_CONFLICTS,
    ),
    Guard(
        "metadata of others is not taken for ours",
        _DELTA,
        "if isinstance(found, dict) and STAMP_KEY in found else None",
        "if isinstance(found, dict) else None",
        _DELTA_TEXT,
    ),
)

_WRITER = f"{_BLOCKS}/transactional.py"
_WRITER_TESTS = (
    f"{_IN_STORES}/test_transactional.py::test_other_rows_need_the_next_generation_and_replace_the_unit",
    f"{_IN_STORES}/test_transactional.py::test_only_receipted_rows_are_applied",
)
_WRITER_DELTA = (f"{_IN_UNIT}/test_transactional_delta.py",)
_EMPTY_OR_STRAY = (
    f"{_IN_STORES}/test_transactional.py"
    "::test_a_unit_on_delta_that_is_empty_is_applied_and_rows_of_another_unit_are_refused",
)
_REDSHIFT_PLAN = f"{_BLOCKS}/redshift.py"
_REDSHIFT_PLAN_TESTS = (
    f"{_IN_UNIT}/test_redshift_sql.py",
    f"{_IN_STORES}/test_transactional.py::test_the_redshift_plan_applies_once_and_a_lost_answer_is_recognised",
    f"{_IN_STORES}/test_transactional.py::test_the_redshift_plan_counts_what_copy_brought",
)

TRANSACTIONAL: tuple[Guard, ...] = (
    Guard(
        "one writer at a time for each unit",
        _WRITER,
        'connection.execute(_LOCK_UNIT, (f"{key.pipeline}/{key.unit}",))',
        "pass",
        (
            f"{_IN_STORES}/test_transactional.py::test_an_older_generation_that_is_about_to_commit_does_not_mix_with_a_newer_one",
        ),
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
        (f"{_IN_STORES}/test_transactional.py::test_staged_rows_that_vanished_are_noticed",),
    ),
    Guard(
        "rows that differ in where their NULL is are other rows",
        _WRITER,
        'f"{delta.column(c)}, isnull({delta.column(c)})"',
        "delta.column(c)",
        (f"{_IN_STORES}/test_transactional.py::test_rows_that_differ_only_in_where_their_null_is_are_other_rows",),
    ),
    Guard(
        "a column without an exact text form is not staged",
        _WRITER,
        "for name, kind in types if kind not in _TYPES]",
        "for name, kind in types if False]",
        (f"{_IN_STORES}/test_transactional.py::test_spark_rows_of_every_type_arrive_exactly",),
    ),
    Guard(
        "a replay does not append",
        _WRITER,
        "        if key.generation != 1:\n",
        "        if False:\n",
        _WRITER_TESTS,
    ),
    Guard(
        "a replay does not append to Delta",
        _WRITER,
        "if replace is None and key.generation != 1:",
        "if False:",
        _WRITER_DELTA,
    ),
    Guard(
        "a predicate of nothing does not mean everything to the writer either",
        _WRITER,
        "        overwrite.refuse_blank(replace, path)\n",
        "        pass\n",
        _WRITER_DELTA,
    ),
    Guard(
        "a unit that a transactional write replaces on Delta keeps to itself",
        _WRITER,
        "with overwrite.checked(spark, path, replace):",
        "if True:",
        _EMPTY_OR_STRAY,
    ),
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
        "staging of a run under way is not swept",
        _WRITER,
        "WHERE created_at < %s ORDER BY name",
        "WHERE %s IS NOT NULL ORDER BY name",
        (f"{_IN_STORES}/test_transactional.py::test_sweeping_drops_old_staging_and_a_zombie_task_then_fails",),
    ),
    Guard("a stale generation on Delta gives way", _WRITER, "    if newer:\n", "    if False:\n", _WRITER_DELTA),
    Guard(
        "a replay after a RESTORE is not ignored in silence",
        _WRITER,
        "    if undone:\n",
        "    if False:\n",
        _WRITER_DELTA,
    ),
    Guard(
        "other content under a key of Delta is refused",
        _WRITER,
        'if stamp.get("content") != content:',
        "if False:",
        _WRITER_DELTA,
    ),
    Guard(
        "an ignored commit without a trace is an error",
        _WRITER,
        "    if not same:\n        raise Terminal(",
        "    if not same:\n        return Outcome(0, content, already=True)\n        raise Terminal(",
        _WRITER_DELTA,
    ),
    Guard(
        "the ledger of Redshift is locked before it is read",
        _REDSHIFT_PLAN,
        'begin=(Statement("BEGIN"), Statement("LOCK TABLE idempotency.ledger")),',
        'begin=(Statement("BEGIN"),),',
        _REDSHIFT_PLAN_TESTS[:1],
    ),
    Guard(
        "an older generation comes too late on Redshift",
        _REDSHIFT_PLAN,
        "if generation > plan.key.generation:",
        "if False:",
        _REDSHIFT_PLAN_TESTS[1:2],
    ),
    Guard(
        "other rows under an applied key are refused on Redshift",
        _REDSHIFT_PLAN,
        "if content != plan.load.content:",
        "if False:",
        _REDSHIFT_PLAN_TESTS[1:2],
    ),
    Guard(
        "what COPY brought is counted",
        _REDSHIFT_PLAN,
        "if staged != plan.load.rows:",
        "if False:",
        _REDSHIFT_PLAN_TESTS[2:],
    ),
    Guard(
        "rows of another unit are not applied on Redshift",
        _REDSHIFT_PLAN,
        "if ours != staged:",
        "if False:",
        _REDSHIFT_PLAN_TESTS[2:],
    ),
    Guard(
        "a statement that failed on Redshift leaves no transaction open",
        _REDSHIFT_PLAN,
        '            ask(Statement("ROLLBACK"))\n        raise',
        "            pass\n        raise",
        _REDSHIFT_PLAN_TESTS[:1],
    ),
    Guard(
        "an address on Redshift cannot leave its quotes",
        _REDSHIFT_PLAN,
        '    if problems:\n        raise InvalidInput("COPY takes',
        '    if False:\n        raise InvalidInput("COPY takes',
        _REDSHIFT_PLAN_TESTS[:1],
    ),
    Guard(
        "names on Redshift cannot leave their quotes",
        _REDSHIFT_PLAN,
        "if _NAME.fullmatch(part) is None:",
        "if False:",
        _REDSHIFT_PLAN_TESTS[:1],
    ),
)

_PROXY = f"{_BLOCKS}/proxy.py"
_PROXY_RULES = (f"{_IN_UNIT}/test_proxy_rules.py",)
_PROXY_TESTS = (f"{_IN_STORES}/test_proxy.py",)
_PROXY_S3 = f"{_BLOCKS}/proxy_s3.py"

PROXY: tuple[Guard, ...] = (
    Guard(
        "an older date does not publish over a newer one",
        _PROXY,
        "return Decision.OLDER if wanted.logical_date < current.logical_date else Decision.MOVE",
        "return Decision.MOVE",
        _PROXY_RULES,
    ),
    Guard(
        "a retry does not undo a roll back",
        _PROXY,
        "if any(past.name == wanted.name for past in moves):",
        "if False:",
        _PROXY_RULES,
    ),
    Guard(
        "a corrected version is not replaced by a late retry of the wrong one",
        _PROXY,
        "if wanted.logical_date == current.logical_date and wanted.number < current.number:",
        "if False:",
        _PROXY_RULES,
    ),
    Guard(
        "a second roll back does not show the bad version again",
        _PROXY,
        "under = way[: names.index(version.name)] if version.name in names else way",
        "under = [past for past in way if past.name != version.name]",
        _PROXY_RULES,
    ),
    Guard(
        "the way back is not collected",
        _PROXY,
        "[*recent[: keep + 1], *behind[: keep + 1]]",
        "recent[: keep + 1]",
        _PROXY_RULES,
    ),
    Guard("the current version is not collected", _PROXY, "    if keep < 0:\n", "    if False:\n", _PROXY_RULES),
    Guard(
        "one move of a name at a time",
        _PROXY,
        "        connection.execute(_LOCK, (proxy.key,))\n        known = connection.execute(_OF_NAME",
        "        known = connection.execute(_OF_NAME",
        (f"{_PROXY_TESTS[0]}::test_of_two_runs_at_once_the_newer_date_is_shown",),
    ),
    Guard(
        "a retry builds no second version",
        _PROXY,
        "        if known is not None:\n            return Version(*known)\n",
        "",
        _PROXY_TESTS,
    ),
    Guard(
        "two logical dates of one second have two names",
        _PROXY,
        "AND left(logical_date, 19) = left(%s, 19)",
        "AND logical_date = %s",
        (f"{_PROXY_TESTS[0]}::test_two_logical_dates_of_one_second_are_two_versions",),
    ),
    Guard("old versions are sealed", _PROXY, "        _seal(connection, table, version.name)\n", "", _PROXY_TESTS),
    Guard(
        "a collected version is not shown",
        _PROXY,
        "if known is None or Version(*known).dropped:",
        "if known is None:",
        _PROXY_TESTS,
    ),
    Guard(
        "young versions are not collected",
        _PROXY,
        "AND dropped_at IS NULL AND sealed_at < %s\n",
        "AND dropped_at IS NULL AND %s IS NOT NULL\n",
        _PROXY_TESTS,
    ),
    Guard(
        "consumers' views are not cascaded away",
        _PROXY,
        'sql.SQL("DROP VIEW {}").format(view)',
        'sql.SQL("DROP VIEW {} CASCADE").format(view)',
        _PROXY_TESTS,
    ),
    Guard(
        "grants survive a change of columns",
        _PROXY,
        "for privilege, grantee, grantable, column in grants:",
        "for privilege, grantee, grantable, column in []:",
        _PROXY_TESTS,
    ),
    Guard(
        "grants of single columns survive a change of columns",
        _PROXY,
        "if column is None or column in columns:",
        "if column is None:",
        _PROXY_TESTS,
    ),
    Guard(
        "a version without objects is not shown",
        _PROXY_S3,
        "if not any(self._objects(self.folder(version))):",
        "if False:",
        _PROXY_TESTS,
    ),
    Guard(
        "an object of a version is written once",
        _PROXY_S3,
        'Body=body, IfNoneMatch="*")',
        "Body=body)",
        _PROXY_TESTS,
    ),
    Guard(
        "other bytes under a written key are noticed",
        _PROXY_S3,
        '["Body"].read() == body:',
        '["Body"].read() is not None:',
        _PROXY_TESTS,
    ),
    Guard(
        "a roll back decides by one reading of the pointer",
        _PROXY_S3,
        "self._point(before, seen, reason=reason, told=True)",
        "self.point(before, reason=reason, told=True)",
        _PROXY_TESTS,
    ),
    Guard(
        "the way back on S3 is not collected",
        _PROXY_S3,
        "if n not in kept and _all_older(",
        "if _all_older(",
        _PROXY_TESTS,
    ),
    Guard(
        "a version that is being written is not collected",
        _PROXY_S3,
        " and _all_older(items, written_before)]",
        "]",
        _PROXY_TESTS,
    ),
    Guard(
        "a run's name cannot leave its folder",
        _PROXY_S3,
        'if not run or any(not (sign.isalnum() or sign in "-_.") for sign in run) or run.startswith("."):',
        "if not run:",
        _PROXY_TESTS,
    ),
)

_MERGER = f"{_BLOCKS}/merger.py"
_MERGER_TESTS = (f"{_IN_STORES}/test_merger.py",)

MERGER: tuple[Guard, ...] = (
    Guard(
        "an increment that contradicts itself is refused",
        _MERGER,
        "contract.refuse(_counts(work, contract, source), unit=target)",
        "pass",
        _MERGER_TESTS,
    ),
    Guard(
        "an increment that contradicts itself is refused on Delta",
        _MERGER,
        "contract.refuse(source.sparkSession.sql(text, increment=increment).collect()[0].asDict(), unit=unit)",
        "source.sparkSession.sql(text, increment=increment).collect()",
        (f"{_MERGER_TESTS[0]}::TestDelta",),
    ),
    Guard(
        "a NULL flag is not guessed at",
        _MERGER,
        "strict = contract.flag is not None and contract.null_flag is NullFlag.REFUSE",
        "strict = False",
        _MERGER_TESTS,
    ),
    Guard(
        "an older change does not replace a newer one",
        _MERGER,
        'newer = f" AND (t.{order} IS NULL OR s.{order} > t.{order})" if order else ""',
        'newer = ""',
        _MERGER_TESTS,
    ),
    Guard(
        "a row without an order is older than any change",
        _MERGER,
        "(t.{order} IS NULL OR s.{order} > t.{order})",
        "s.{order} > t.{order}",
        (f"{_MERGER_TESTS[0]}::test_a_row_from_before_the_order_column_is_older_than_any_change",),
    ),
    Guard(
        "a deleted row comes back by a newer insert only",
        _MERGER,
        "        buried = f",
        '        buried = "" and f',
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
        "a late replay does not bring a deleted row back on Delta",
        _MERGER,
        "            spark.sql(delta_tombstones(contract, resolved, tombstones), increment=increment).collect()\n",
        "            pass\n",
        (f"{_MERGER_TESTS[0]}::TestDelta",),
    ),
    Guard(
        "an older change does not replace a newer one on Redshift",
        _MERGER,
        '        statements.append(f"DELETE FROM {work} USING {into} WHERE {same} AND {older}")\n',
        "",
        (f"{_MERGER_TESTS[0]}::test_the_statements_for_redshift_keep_the_newer_row_and_the_delete",),
    ),
    Guard(
        "a merge without memory of deletes is refused",
        _MERGER,
        "if contract.needs_tombstones and tombstones is None:",
        "if False:",
        (f"{_IN_UNIT}/test_merger_text.py",),
    ),
    Guard(
        "one merge into a table at a time",
        _MERGER,
        '    work.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(_table(target)))\n',
        "",
        (f"{_MERGER_TESTS[0]}::test_a_late_change_that_meets_a_delete_does_not_bring_the_row_back",),
    ),
    Guard(
        "staging without a transaction is refused",
        _MERGER,
        'if connection.info.transaction_status.name == "IDLE":',
        "if False:",
        _MERGER_TESTS,
    ),
    Guard(
        "a session that was opened again finds the rows that it checked",
        _DELTA,
        'before, place.session = getattr(place, "session", None), frame.sparkSession',
        'before = getattr(place, "session", None)',
        (f"{_MERGER_TESTS[0]}::TestDelta::test_a_second_session_of_the_process_merges_rows_of_its_own",),
    ),
)

_STATEFUL = f"{_BLOCKS}/stateful.py"
_STATEFUL_TESTS = (f"{_IN_STORES}/test_stateful.py::TestPostgres",)
_STATEFUL_DELTA = (f"{_IN_STORES}/test_stateful.py::TestDelta",)
_DECISION = f"{_BLOCKS}/stateful_rules.py"
_MATRIX = (f"{_IN_UNIT}/test_stateful_rules.py",)

STATEFUL: tuple[Guard, ...] = (
    Guard(
        "a restore does not undo what somebody else did to a row",
        _STATEFUL,
        "if drift and not self._accept_drift:",
        "if False:",
        _STATEFUL_TESTS,
    ),
    Guard(
        "a row is spelled alike in every session",
        _STATEFUL,
        "        with _spelling(work):\n",
        "        if True:\n",
        _STATEFUL_TESTS,
    ),
    Guard(
        "forgotten images are not restored from",
        _STATEFUL,
        "restorable_from=forgotten)",
        "restorable_from=0)",
        _STATEFUL_TESTS,
    ),
    Guard(
        "tombstones outside the table are refused",
        _STATEFUL,
        "    if contract.needs_tombstones:\n",
        "    if False:\n",
        _STATEFUL_TESTS,
    ),
    Guard(
        "a table without history is refused",
        _STATEFUL,
        '            raise InvalidInput("the table has no history."',
        '            return History(())\n            raise InvalidInput("the table has no history."',
        _STATEFUL_TESTS,
    ),
    Guard(
        "a stamp counts only on the operation that it was made for",
        _STATEFUL,
        'if ours and found.operation == "MERGE" and stamp.get',
        "if ours and stamp.get",
        (f"{_IN_STORES}/test_stateful.py::test_a_stamp_left_on_by_a_session_does_not_pass_for_a_run",),
    ),
    Guard(
        "a run that was overtaken gives way",
        _STATEFUL,
        "        if between:\n",
        "        if False:\n",
        (f"{_IN_STORES}/test_stateful.py::test_a_run_that_decided_before_another_one_committed_gives_way",),
    ),
    Guard(
        "an increment that changes nothing leaves its mark",
        _STATEFUL,
        "with delta.commit_as(self._spark, text), delta.settings(self._spark, delta.RECORD_EMPTY):",
        "with delta.commit_as(self._spark, text):",
        _STATEFUL_DELTA,
    ),
    Guard(
        "an erased row stays erased",
        _STATEFUL,
        "        table.erase()\n",
        "        pass\n",
        _STATEFUL_DELTA,
    ),
    Guard(
        "an erased row does not come with the increment",
        _STATEFUL,
        'wanted = wanted.where(f"NOT coalesce({predicate}, false)")',
        "pass",
        _STATEFUL_DELTA,
    ),
    Guard(
        "what a dead run had to erase is erased by the next",
        _STATEFUL,
        "self._erase = once((*owed_erasures(commits), *self._erase))",
        "pass",
        _STATEFUL_DELTA,
    ),
    Guard(
        "a forward run does not pass over what a dead run had to erase",
        _STATEFUL,
        "    if owed := owed_erasures(commits):\n",
        "    if owed := ():\n",
        (f"{_IN_UNIT}/test_forward.py",),
    ),
    Guard(
        "a bad increment does not put the table back",
        _STATEFUL,
        "        table.check()  # before",
        "        pass  # before",
        _STATEFUL_DELTA,
    ),
    Guard(
        "one run at a time decides on PostgreSQL",
        _STATEFUL,
        '        work.execute(sql.SQL("LOCK TABLE {target} IN SHARE ROW EXCLUSIVE MODE").format(**_names(target)))\n',
        "",
        (f"{_STATEFUL_TESTS[0]}::test_of_two_runs_at_once_the_second_decides_by_what_the_first_has_left",),
    ),
    Guard(
        "a merge whose commit is not found is no success",
        _STATEFUL,
        "        if version is None:\n            raise MarkMissing(",
        "        if version is None:\n            return commits[-1].version\n            raise MarkMissing(",
        _DELTA_CONFLICTS,
    ),
    Guard(
        "a restore does not take the rows of other tables along",
        _STATEFUL,
        "        if dependents:\n",
        "        if False:\n",
        _STATEFUL_TESTS,
    ),
    Guard(
        "a lane that moves forward merges again what a restore took back",
        _STATEFUL,
        "if ours and not _undone(commit, commits[place + 1 :]):",
        "if ours:",
        (f"{_IN_UNIT}/test_forward.py",),
    ),
    Guard(
        "a lane that moves forward recognises its own commit",
        _STATEFUL,
        "if ours and not _undone(commit, commits[place + 1 :]):",
        "if False:",
        (f"{_IN_UNIT}/test_forward.py",),
    ),
    Guard(
        "a request that is in the table is done",
        _DECISION,
        "if own is not None and own.request == run.request:",
        "if False:",
        _MATRIX,
    ),
    Guard(
        "a request that was replaced does not come back",
        _DECISION,
        "    if run.execution in now.live and any(",
        "    if False and any(",
        _MATRIX,
    ),
    Guard(
        "a run without its predecessor is refused",
        _DECISION,
        "    return _missing_predecessor(history, now, run, marks)\n",
        "    return None\n",
        _MATRIX,
    ),
    Guard(
        "a log that was cut does not pass for a first run",
        _DECISION,
        "(not marks and history.complete)",
        "(not marks)",
        _MATRIX,
    ),
    Guard("a history that cannot be read stops everything", _DECISION, "if not now.known:", "if False:", _MATRIX),
    Guard(
        "a version beyond retention is refused",
        _DECISION,
        "if target not in states or target < history.restorable_from:",
        "if target not in states:",
        _MATRIX,
    ),
    Guard("a restore does not undo an earlier run", _DECISION, "    if undone:\n", "    if False:\n", _MATRIX),
    Guard("a restore does not undo somebody's work", _DECISION, "    if foreign:\n", "    if False:\n", _MATRIX),
    Guard(
        "a merge that was made twice keeps the base of the first",
        _DECISION,
        "base = min(before.base, mark.base_version) if before else mark.base_version",
        "base = mark.base_version",
        _MATRIX,
    ),
    Guard("executions of two widths are refused", _DECISION, "    if strange:\n", "    if False:\n", _MATRIX),
    Guard(
        "an interrupted restore is carried on",
        _DECISION,
        "restored=_ends_with_our_restore(history)",
        "restored=False",
        _MATRIX,
    ),
)

_KEYED = f"{_BLOCKS}/keyed.py"
_KEYS = (f"{_IN_UNIT}/test_keyed.py",)
_KEYED_TESTS = tuple(
    f"{_IN_STORES}/test_keyed.py::{name}"
    for name in (
        "test_other_bytes_under_the_same_key_are_refused_unless_the_replay_is_meant",
        "test_of_racing_writers_one_wins_and_the_others_change_nothing",
        "test_a_replacement_that_lost_a_race_writes_nothing",
    )
)

KEYED: tuple[Guard, ...] = (
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
    Guard(
        "parts of a key do not run into each other",
        _KEYED,
        'return b"s%d:%s;" % (len(body), body)',
        'return b"s%s;" % body',
        _KEYS,
    ),
    Guard("NULL differs from an empty text", _KEYED, 'return b"n;"', 'return b"s0:;"', _KEYS),
    Guard(
        "true is no number",
        _KEYED,
        "case Kind.INTEGER, int() if not isinstance(value, bool) and -_LONGEST",
        "case Kind.INTEGER, int() if -_LONGEST",
        _KEYS,
    ),
    Guard(
        "an event counts once, at its earliest position",
        _KEYED,
        "for event in sorted(set(events), key=_appended):",
        "for event in sorted(set(events), key=_appended, reverse=True):",
        _KEYS,
    ),
    Guard(
        "a session that joined another leaves no orphan",
        _KEYED,
        "FROM {stored} s LEFT ANTI JOIN {wanted} w ON s.key = w.key",
        "FROM {stored} s LEFT ANTI JOIN {wanted} w ON true",
        (f"{_IN_STORES}/test_keyed.py::test_sessions_of_any_split_with_crashes_equal_those_of_one_batch",),
    ),
    Guard(
        "a column of another type is refused",
        _KEYED,
        '    if problems:\n        raise InvalidInput("the columns of the key',
        '    if False:\n        raise InvalidInput("the columns of the key',
        (f"{_IN_STORES}/test_keyed.py::test_a_column_of_another_type_is_refused_by_spark_as_by_python",),
    ),
)

IDEMPOTENCY = CLEANER + OVERWRITE + TRANSACTIONAL + PROXY + MERGER + STATEFUL + KEYED

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
        "a tick is read however long it waited",
        "lockstep/ticks/bronze.py",
        "    delta.read_however_old(spark)",
        "    pass",
        ("tests/integration/silver/test_retention.py",),
    ),
    Guard(
        "vacuum leaves what a replay goes back by",
        f"{_SILVER}retention.py",
        "if days < FILES_DAYS:",
        "if days < 0:",
        ("tests/integration/silver/test_retention.py",),
    ),
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
        "a skipped tick leaves nothing in the tables that it reached",
        f"{_SILVER}worker.py",
        "self._tables.put_back(self._step(held, tick, spec))",
        "pass",
        ("tests/integration/silver/test_skip.py",),
    ),
    Guard(
        "only the tick that stops a lane can be skipped",
        f"{_SILVER}store.py",
        "AND generation = %(generation)s AND parked = %(tick)s",
        "",
        ("tests/integration/silver/test_skip.py",),
    ),
    Guard(
        "a replay passes over a skipped tick again",
        f"{_SILVER}operations.py",
        "lifted = tuple(found) if named else ()",
        "lifted = tuple(found)",
        ("tests/integration/silver/test_skip.py",),
    ),
    Guard(
        "what a dead report left staged is swept",
        f"{_SILVER}report.py",
        "            transactional.sweep(connection, created_before=now - KEPT_FOR)\n",
        "            pass\n",
        ("tests/integration/silver/test_gold.py::test_what_a_dead_report_left_staged_goes_with_a_later_one",),
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
        "a replica asks the table for a pipeline by its name",
        f"{_READINESS}/control.py",
        "plan = self._plane.plan(pipeline)",
        "plan = self._plane.plans().get(pipeline)",
        (f"{_UNIT}/test_service.py",),
    ),
    Guard(
        "a marker of a young pipeline is not refused",
        f"{_READINESS}/worker.py",
        "return {**plans, **found} if found else plans",
        "return plans",
        (f"{_UNIT}/test_driver.py",),
    ),
    Guard(
        "a pipeline with an open execution stays",
        f"{_READINESS}/store.py",
        'CONFIG, Lacks("open"))])',
        "CONFIG)])",
        ("tests/integration/readiness/test_store.py",),
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
        "a refusal of a repeated start does not say that nothing runs",
        f"{_READINESS}/rules.py",
        "    if state.in_doubt:\n",
        "    if False:\n",
        (f"{_UNIT}/test_driver.py", "tests/property/readiness/test_interleavings.py"),
    ),
    Guard(
        "a clock that ran ahead holds no execution",
        f"{_READINESS}/rules.py",
        "        moved[field] = latest\n        return latest\n",
        "        return moment\n",
        (f"{_UNIT}/test_driver.py",),
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
