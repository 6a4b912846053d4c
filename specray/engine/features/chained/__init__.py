"""Drafters that go on with their own output."""
