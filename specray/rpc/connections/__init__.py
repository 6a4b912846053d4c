"""Connections of a router to its engines."""
