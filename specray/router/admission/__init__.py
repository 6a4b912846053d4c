"""Who runs and who waits: queue, fairness, quotas, checks."""
