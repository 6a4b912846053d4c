"""Training of drafts and targets, and larger checkpoints that compute the same function."""
