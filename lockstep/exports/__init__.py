"""Exports: asynchronous jobs that turn (key, date) pairs into files, built once, published by fence."""
