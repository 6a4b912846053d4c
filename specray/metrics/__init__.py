"""Prometheus metrics of the router, and the fast counters behind them."""
