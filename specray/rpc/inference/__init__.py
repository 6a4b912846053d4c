"""The public InferenceService: its vocabulary, server and client."""
