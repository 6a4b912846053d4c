"""Attention of a ragged step over the block cache, by several backends that agree."""
