"""Capacity planning: simulates the real router over a measured pair, and searches for a fleet.

Imports the router and the fakes' virtual clock, but no engine, RPC or Ray: a plan needs a profile alone.
"""
