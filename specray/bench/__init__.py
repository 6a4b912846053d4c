"""Benchmarks of a running server, of the parts of one, and comparisons with other servers."""
