"""Drafters in the draft's process: features go there, and it drafts from them."""
