"""Refusals at the ingress: keys, limits, and answers that need no router."""
