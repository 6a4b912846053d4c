"""Placement, lifetimes, leases and health on Ray; a thin shell around what also runs without it."""
