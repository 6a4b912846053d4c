"""Public InferenceService over gRPC: types, server and client."""
