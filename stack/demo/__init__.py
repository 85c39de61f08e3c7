"""The demo: the whole platform, played through the doors that people use, and held against independent oracles."""
