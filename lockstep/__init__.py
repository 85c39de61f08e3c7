"""The domain: pure rules and adapters. Never imports Dagster."""
