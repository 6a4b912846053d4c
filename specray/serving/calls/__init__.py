"""From what a caller asks for to the requests of one call."""
