"""Simulated engines and fleets in virtual time, for the planner."""
