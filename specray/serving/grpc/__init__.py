"""The public gRPC service: its handler over a RouterClient."""
