"""Admission of requests: who runs and who waits, with queue, fairness, quotas and checks."""
