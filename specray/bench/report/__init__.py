"""Results of benchmarks as tables, charts and timelines."""
