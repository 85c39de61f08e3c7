"""What all pipelines share: clock, ids, errors, retries, leases, outbox, logging, metrics, settings."""
