"""Drafts on Ray: the Draft deployment, its group of ranks, and the source from which a router leases one."""
