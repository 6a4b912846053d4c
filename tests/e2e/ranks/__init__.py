"""Tests of one service whose target and draft have two ranks each."""
