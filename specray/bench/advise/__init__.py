"""Advises on drafts for a target: what each would gain, which is best, and what would change that."""
