"""The seven idempotency patterns as blocks: retry-safe and backfill-safe, without Dagster."""
