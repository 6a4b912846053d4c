"""Checks of a model before it serves: its files, its configuration, its weights, and its forward."""
