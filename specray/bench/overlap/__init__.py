"""Comparison of serial, overlapped and plain rounds, and timelines of what happened."""
