"""Attention of bfloat16 with AMX; see ``attend``."""
