"""A mixed load on a service that is being hurt on a schedule, and what came of it."""
