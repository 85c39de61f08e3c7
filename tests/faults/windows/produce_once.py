"""One pass of a producer in a process of its own, so that a test may kill it: vault, address, bucket, table, folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.producer_world import Place, producing


def main(vault: str, url: str, bucket: str, table: str, folder: str) -> None:
    """Run; one worker, so that the n-th pass of a crash point is always the same moment."""
    with producing(Place(bucket, table), vault, url, Path(folder), workers=1) as producer:
        producer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
