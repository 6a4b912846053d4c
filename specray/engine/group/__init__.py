"""A tensor-parallel group: its ranks, and the messages between them."""
