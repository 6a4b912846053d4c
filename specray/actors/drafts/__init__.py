"""Drafts on Ray: the Draft deployment, its group of ranks, and where a router leases one."""
