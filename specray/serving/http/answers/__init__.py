"""Parts of answers that both APIs share."""
