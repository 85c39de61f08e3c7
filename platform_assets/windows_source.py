"""The source side of windows, per vault: what the vendor publishes, and the raw windows that we keep of it.

What belongs here: the assets and their words. What does not: what a producer does (lockstep/windows/producer.py), when
it runs (jobs/windows_producer.py), and everything behind the queue. No `from __future__ import annotations`: Dagster
reads the annotations as real types.
"""

import dagster as dg

from lockstep.kernel.clock import SystemClock
from lockstep.windows.listing import read_listing
from lockstep.windows.model import QUEUE_TABLE, WindowKind, check_vault_id, stoptime
from lockstep.windows.producer import ProducerReport
from resources.databases import PostgresResource
from resources.vaults import VaultSourceResource
from resources.windows import WindowsResource

OWNERS = ["team:lockstep"]
GAP_CHECK = "raw_windows_gap_check"


def vault_group(vault: str) -> str:
    """The group of a vault's assets, and the first part of their keys."""
    return f"vault_{check_vault_id(vault).replace('-', '_')}"


def source_key(vault: str) -> dg.AssetKey:
    """What the vendor publishes."""
    return dg.AssetKey([vault_group(vault), "veeva_source"])


def raw_windows_key(vault: str) -> dg.AssetKey:
    """What we keep of it."""
    return dg.AssetKey([vault_group(vault), "raw_windows"])


def build_vault_source_assets(vault: str) -> list[dg.AssetsDefinition]:
    """The two source-side assets of one vault: the observed source, and the raw windows."""
    return [_source(vault), _raw_windows(vault)]


def _source(vault: str) -> dg.AssetsDefinition:
    spec = dg.AssetSpec(
        key=source_key(vault),
        group_name=vault_group(vault),
        kinds={"veeva"},
        owners=OWNERS,
        description=(
            f"The Direct Data API of vault {vault}: one archive per 15 minutes, kept by the vendor for ten days. "
            "Observing it asks for the listing and fetches nothing."
        ),
    )

    @dg.multi_observable_source_asset(specs=[spec], name=f"{spec.key.to_python_identifier()}_observation")
    def veeva_source(vault_source: VaultSourceResource, postgres: PostgresResource) -> dg.ObserveResult:
        with vault_source.producer(vault, postgres) as producer:
            listing = read_listing(vault, producer.list_incrementals())
        stops = [one.window.stop for one in listing.published]
        newest = stoptime(max(stops)) if stops else "none"
        return dg.ObserveResult(
            asset_key=spec.key,
            data_version=dg.DataVersion(f"{newest}-{len(stops)}-{len(listing.missing)}"),
            metadata={"published": len(stops), "not_published": len(listing.missing), "newest_stop": newest},
        )

    return veeva_source


def _raw_windows(vault: str) -> dg.AssetsDefinition:
    key = raw_windows_key(vault)

    @dg.asset(
        key=key,
        deps=[source_key(vault)],
        group_name=vault_group(vault),
        kinds={"python", "s3", "dynamodb"},
        owners=OWNERS,
        tags={"lockstep/vault": vault},
        pool=f"produce_{vault_group(vault)}",
        check_specs=[
            dg.AssetCheckSpec(
                name=GAP_CHECK,
                asset=key,
                description="No window between the first and the newest one is missing in the queue.",
            )
        ],
        description=(
            f"Everything that vault {vault} lists, unpacked, counted and kept in the bucket of raw windows, each with "
            f"a row in {QUEUE_TABLE}. A window that cannot be fetched yet is a gap and is tried again."
        ),
    )
    def raw_windows(
        context: dg.AssetExecutionContext,
        vault_source: VaultSourceResource,
        postgres: PostgresResource,
        windows: WindowsResource,
    ) -> dg.MaterializeResult:
        watermark, epoch = windows.chain(vault)
        with vault_source.producer(vault, postgres) as producer:
            report = producer.run(watermark=watermark, epoch=epoch)
        for problem in report.problems:
            context.log.warning(problem)
        observed = {"listed": report.listed, "not_retrievable": len(report.gaps)}
        context.log_event(dg.AssetObservation(asset_key=source_key(vault), metadata=observed))
        return dg.MaterializeResult(
            asset_key=key, metadata=_metadata(report, vault_source.bucket), check_results=[_gap_result(vault, report)]
        )

    return raw_windows


def _metadata(report: ProducerReport, bucket: str) -> dict[str, dg.MetadataValue]:
    until = report.contiguous_until
    found = {
        "listed": dg.MetadataValue.int(report.listed),
        "new_windows": dg.MetadataValue.int(len(report.produced)),
        "fetched_anew": dg.MetadataValue.int(len(report.replaced)),
        "gaps": dg.MetadataValue.md(_gap_table(report)),
        "problems": dg.MetadataValue.md("\n".join(f"- {one}" for one in report.problems) or "none"),
        "dagster/uri": dg.MetadataValue.text(f"s3://{bucket}/vault={report.vault}/"),
    }
    if until is not None:
        lag = (SystemClock().now() - until).total_seconds() / 60
        found["without_a_gap_until"] = dg.MetadataValue.timestamp(until)
        found["lag_minutes"] = dg.MetadataValue.float(round(lag, 1))
    return found


def _gap_table(report: ProducerReport) -> str:
    if not report.gaps:
        return "none"
    rows = [
        f"| {gap.start:%Y-%m-%d %H:%M} | {gap.stop:%Y-%m-%d %H:%M} | {gap.reason} |"
        if gap.start
        else f"| ? | {gap.stop:%Y-%m-%d %H:%M} | {gap.reason} |"
        for gap in report.gaps
    ]
    return "\n".join(["| from | to | why |", "|---|---|---|", *rows])


def _gap_result(vault: str, report: ProducerReport) -> dg.AssetCheckResult:
    count = len(report.gaps)
    return dg.AssetCheckResult(
        asset_key=raw_windows_key(vault),
        check_name=GAP_CHECK,
        passed=not count,
        severity=dg.AssetCheckSeverity.WARN,
        description="the chain has no gap" if not count else f"{count} gap(s); apply waits at the first one",
        metadata={"gaps": dg.MetadataValue.md(_gap_table(report)), "kind": WindowKind.INCREMENTAL.value},
    )
