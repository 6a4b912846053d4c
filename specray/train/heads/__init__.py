"""Trains heads that draft from a target's hidden states: EAGLE-3 and Medusa."""
