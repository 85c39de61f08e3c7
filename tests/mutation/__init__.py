"""Guards removed one at a time: some test must notice each."""
