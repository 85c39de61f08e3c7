"""The self-test: one small message that walks through every part and is checked at the end."""
