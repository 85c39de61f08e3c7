"""Evaluators: how a trait is answered, over HTTP, by a program, by a function or by a builtin."""
