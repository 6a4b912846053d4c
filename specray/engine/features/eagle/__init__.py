"""EAGLE drafters: their checkpoints, and their forward."""
