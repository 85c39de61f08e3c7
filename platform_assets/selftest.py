"""The self-test's table and its check: doors into lockstep/selftest/worker.py.

What belongs here: the asset, its check, its run configuration. What does not: rules, Spark code, queues.
No `from __future__ import annotations`: Dagster reads the annotations of `config` as real types.
"""

import dagster as dg
from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.clock import SystemClock
from lockstep.selftest import rules, worker
from lockstep.selftest.model import CHECK, LANE, QUEUE, TABLE, SelftestReceipt
from resources.aws import SqsResource
from resources.lake import LakeResource
from resources.spark import SparkResource


class SelftestConfig(dg.Config):
    """One request. The defaults let a person press Materialize without typing anything."""

    id: str = "by-hand"
    rows: int = 10
    receipt_handle: str = ""


@dg.asset(
    name=TABLE,
    group_name="selftest",
    kinds={"spark", "deltalake", "s3"},
    owners=["team:lockstep"],
    tags={"lockstep/lane": LANE},
    pool=f"lane_{LANE}",
    description=(
        "Rows that the self-test writes through Spark into a Delta table on S3, one id per request. "
        "Writing an id again replaces its rows; ids older than a week are removed."
    ),
)
def selftest_table(
    context: dg.AssetExecutionContext,
    config: SelftestConfig,
    spark: SparkResource,
    lake: LakeResource,
    sqs: SqsResource,
) -> dg.MaterializeResult:
    """Commit the rows, and only then delete the message that asked for them."""
    request = rules.parse_request(config.id, config.rows)
    path, now = lake.table_path(TABLE), SystemClock().now()
    receipt = worker.write(spark.spark_session, path, request, now=now)
    if config.receipt_handle:
        _delete_message(context, sqs, config.receipt_handle)
    worker.prune(spark.spark_session, path, now=now)
    context.log.info("self-test %s: %s rows in %s", request.id, receipt.rows, path)
    return dg.MaterializeResult(metadata=_metadata(config.id, config.rows, receipt))


@dg.asset_check(
    asset=TABLE,
    name=CHECK,
    description=(
        "The table holds exactly the rows that the latest self-test asked for. "
        "It counts distinct rows; it does not compare their values."
    ),
)
def selftest_rows_check(
    context: dg.AssetCheckExecutionContext, spark: SparkResource, lake: LakeResource
) -> dg.AssetCheckResult:
    """Read back what the latest materialization claims. The lane's pool keeps other writers out meanwhile."""
    event = context.instance.get_latest_materialization_event(dg.AssetKey(TABLE))
    if event is None or event.asset_materialization is None:
        return dg.AssetCheckResult(passed=False, description="The table was never written.")
    claimed = event.asset_materialization.metadata
    token, asked = str(claimed["id"].value), int(str(claimed["asked_rows"].value))
    found = worker.count_rows(spark.spark_session, lake.table_path(TABLE), token)
    return dg.AssetCheckResult(
        passed=found == asked,
        description=f"{found} of {asked} rows",
        metadata={"id": token, "asked_rows": asked, "found_rows": found},
    )


def _delete_message(context: dg.AssetExecutionContext, sqs: SqsResource, receipt_handle: str) -> None:
    # The rows are committed, so the run has succeeded whatever SQS says. A handle goes stale when the message
    # was delivered again meanwhile: the sensor then finds the succeeded run and deletes the message itself.
    client = sqs.get_client()
    try:
        url = client.get_queue_url(QueueName=QUEUE)["QueueUrl"]
        client.delete_message(QueueUrl=url, ReceiptHandle=receipt_handle)
    except (BotoCoreError, ClientError) as error:
        context.log.warning("message not deleted yet, the sensor will: %s", error)


def _metadata(token: str, asked: int, receipt: SelftestReceipt) -> dict[str, dg.MetadataValue]:
    lines = "\n".join(f"| {row_id} | {n} | {value} |" for row_id, n, value in receipt.preview)
    return {
        "id": dg.MetadataValue.text(token),
        "asked_rows": dg.MetadataValue.int(asked),
        "dagster/row_count": dg.MetadataValue.int(receipt.rows),
        "dagster/uri": dg.MetadataValue.text(receipt.table),
        "preview": dg.MetadataValue.md(f"| id | n | value |\n|---|---|---|\n{lines}"),
    }


assets = [selftest_table]
checks = [selftest_rows_check]
