"""``specray advise``."""
