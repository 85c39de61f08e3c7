"""FastAPI applications: HTTP doors into the domain."""
