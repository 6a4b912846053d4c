"""Admission control at the ingress: API keys, quotas, and refusals that need no router."""
