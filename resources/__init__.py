"""Dagster resources: the only place that builds clients. See assembly.py for the one choice of resources."""
