"""The readiness control plane: whether a pipeline may run now, and whether its result is still good afterwards."""
