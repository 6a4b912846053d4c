"""What proposes draft tokens for a session, and what the draft is given to read."""
