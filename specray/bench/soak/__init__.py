"""A mixed load on a service whose parts fail on a schedule, and a check of every output."""
