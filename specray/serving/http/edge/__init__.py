"""What stands around the HTTP application: middleware that knows nothing of the API."""
