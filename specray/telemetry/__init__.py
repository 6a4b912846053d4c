"""Telemetry of a service: logs, traces, and the metrics of many replicas as one text."""
