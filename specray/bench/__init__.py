"""Measuring: a running server, and the parts of one."""
