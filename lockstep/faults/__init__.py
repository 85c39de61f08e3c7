"""Faults on purpose: histories, a checker, a seeded simulation of the domain code, and a lab on real parts."""
