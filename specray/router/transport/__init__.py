"""Connections to engines as the router's loop sees them: links, leases, renewal, time."""
