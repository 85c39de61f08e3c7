"""Silver: committed ticks applied to the project's silver tables, in order and once. See docs/ticks-silver.md."""
