"""Mixtures of experts: whose a row is, what they compute, and what stands beside them."""
