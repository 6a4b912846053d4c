"""Trains a small draft for any chat model, on text that the model writes itself."""
