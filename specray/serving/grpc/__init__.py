"""The public gRPC service."""
