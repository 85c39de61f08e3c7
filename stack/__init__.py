"""Starts the real parts on one machine, without containers. Knows processes, ports and health; no business rule."""
