"""What a draft reads of the target's tokens: in its own vocabulary, and in a window."""
