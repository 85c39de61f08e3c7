"""The one choice of resources: from settings to what assets and sensors receive.

What belongs here: which resource stands behind which key. What does not: any other decision by environment;
there is none elsewhere. Nothing is opened here: addresses are `EnvVar`, read when a run or a tick needs them.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from dagster_aws.s3 import S3Resource

from lockstep.kernel.settings import Settings
from resources.aws import DynamoDBResource, SqsResource
from resources.databases import PostgresResource, WarehouseResource
from resources.lake import LakeResource
from resources.readiness_plane import AlertsResource, ReadinessResource
from resources.spark import SparkResource
from resources.vaults import VaultSourceResource
from resources.windows import WindowsResource


def build_resources(settings: Settings) -> dict[str, Any]:
    """Every resource of the platform, by the name that assets and sensors ask for."""
    return {
        "spark": _spark(settings),
        "lake": LakeResource(bucket=settings.lake_bucket),
        "s3": S3Resource(region_name=settings.aws_region),
        "sqs": SqsResource(region_name=settings.aws_region),
        "dynamodb": DynamoDBResource(region_name=settings.aws_region),
        "readiness": ReadinessResource(),
        "alerts": AlertsResource(),
        "postgres": PostgresResource(dsn=dg.EnvVar("LOCKSTEP_POSTGRES_DSN")),
        "source": PostgresResource(dsn=dg.EnvVar("LOCKSTEP_SOURCE_DSN")),
        "vault_source": VaultSourceResource(
            region_name=settings.aws_region,
            bucket=settings.windows_bucket,
            work_folder=str(settings.home / "work" / "windows"),
        ),
        "warehouse": WarehouseResource(dsn=dg.EnvVar("LOCKSTEP_WAREHOUSE_DSN"), dialect=settings.warehouse_dialect),
        "windows": build_windows(settings, dg.EnvVar("LOCKSTEP_WAREHOUSE_DSN"), dg.EnvVar("LOCKSTEP_POSTGRES_DSN")),
    }


def build_windows(settings: Settings, dsn: str, state_dsn: str) -> WindowsResource:
    """The window pipeline on the warehouse of this deployment."""
    if settings.warehouse_dialect != "redshift":
        return WindowsResource(dsn=dsn, bucket=settings.windows_bucket, region_name=settings.aws_region)
    from resources.redshift import RedshiftWindowsResource  # imports the driver of dagster-aws

    return RedshiftWindowsResource(
        dsn=dsn,
        bucket=settings.windows_bucket,
        region_name=settings.aws_region,
        state_dsn=state_dsn,
        iam_role=settings.warehouse_iam_role,
    )


def _spark(settings: Settings) -> SparkResource:
    if settings.spark_mode == "classic":
        return SparkResource(mode="classic")
    return SparkResource(mode="connect", remote=dg.EnvVar("LOCKSTEP_SPARK_REMOTE"))
