"""``specray train``: trains drafts and heads for a target."""
