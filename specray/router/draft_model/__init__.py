"""The leased draft model: what it is asked and when, what it prefills, how long rounds wait for it."""
