"""Serial, overlapped and plain rounds against each other, and timelines of what happened."""
