"""Parts of decoder layers that some families have."""
