"""Asset jobs, schedules and run-queue tags. No computation."""
