"""The way of committed tokens back to the caller."""
