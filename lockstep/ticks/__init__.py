"""Ticks: files from on-prem agents, committed to bronze in order and exactly once, then followed by silver."""
