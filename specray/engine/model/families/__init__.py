"""Families of models: what their configurations mean to the decoder."""
