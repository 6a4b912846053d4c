"""Capacity: a measured pair, the real router over simulated engines in virtual time, and a search.

Imports the router and the fakes' virtual clock, and no engine, RPC or Ray: a plan needs a profile alone.
"""
