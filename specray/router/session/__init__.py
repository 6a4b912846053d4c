"""One request as a state machine without I/O and clock, and the values that it takes and gives."""
