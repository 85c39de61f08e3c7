"""The software-defined assets, partitions and checks. Thin doors into workers; rules live in lockstep/."""
