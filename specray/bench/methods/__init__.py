"""Compares everything that can draft for one target, by category of prompts."""
