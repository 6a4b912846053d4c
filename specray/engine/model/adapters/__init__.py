"""Adapters that are loaded while the model serves, and several of them in one step."""
