"""The kernel of all measurements: arms in turns over a service, their figures, and the report."""
