"""The bfloat16 attention kernel with AMX; see ``attend``."""
