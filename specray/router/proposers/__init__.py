"""Proposers of one session without a draft model, and the interface that all proposers share."""
