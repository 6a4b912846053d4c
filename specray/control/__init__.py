"""Decides how much to speculate from measurements. Pure: no I/O, no clock, no metrics."""
