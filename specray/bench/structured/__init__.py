"""Structured output of a running server: many schemas, speculation on and off, and hostile grammars."""
