"""Drafters that draw a block of tokens in one forward (DFlash, DSpark)."""
