"""The target engine: verification, lookahead, and the draws of a group."""
