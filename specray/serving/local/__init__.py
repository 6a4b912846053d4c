"""Runs a pair of engines on this machine without Ray."""
