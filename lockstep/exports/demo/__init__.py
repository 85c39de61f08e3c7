"""The demo's source database: keys, and the function that a worker reads. Only its migrations live here."""
