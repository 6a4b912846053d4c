"""Turns what a caller asks for into the requests of one call."""
