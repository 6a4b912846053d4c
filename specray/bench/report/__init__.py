"""Results as tables, charts and timelines."""
