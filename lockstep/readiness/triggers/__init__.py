"""Triggers: how a job is started, asked after and stopped, wherever it runs."""
