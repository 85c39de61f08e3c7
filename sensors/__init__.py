"""Sensors, one module per pipeline: read hints, read the ledger, request runs. No business rule."""
