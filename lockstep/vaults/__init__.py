"""Vaults that the platform reads from: their addresses, and where their credentials come from."""
