"""The vault simulator: a stand-in for the vendor, deterministic from a seed and faithful on the wire."""
