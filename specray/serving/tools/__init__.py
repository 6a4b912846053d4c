"""Function tools: what a request offers, how a model writes a call, and how a call is read back or forced."""
