"""Proposers: what drafts tokens for a session, and what the draft is given to read."""
