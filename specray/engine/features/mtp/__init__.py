"""Layers inside of a target's checkpoint that predict further tokens (MTP)."""
