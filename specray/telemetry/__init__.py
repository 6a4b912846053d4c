"""What a service tells of itself: logs, traces, and the metrics of many replicas as one text."""
