"""Which of several models are loaded: decides it, does it, and counts who uses them."""
