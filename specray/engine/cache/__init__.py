"""The block cache: where keys and values live, whose they are, and which prefixes can serve again."""
