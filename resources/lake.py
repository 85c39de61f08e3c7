"""Where the Delta tables live. One place that spells a table's address.

What belongs here: addresses. What does not: reading or writing tables, which needs Spark (spark.py).
"""

from __future__ import annotations

import dagster as dg


class LakeResource(dg.ConfigurableResource):
    """The bucket of the Delta tables."""

    bucket: str

    def table_path(self, *parts: str) -> str:
        """The address of a table as Spark spells it, for example `table_path("silver", "orders")`."""
        return f"s3a://{self.bucket}/" + "/".join(parts)
