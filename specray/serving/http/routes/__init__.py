"""Endpoints beside those that generate."""
