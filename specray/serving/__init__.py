"""The ingress: OpenAI-compatible HTTP and the public gRPC service, in front of any RouterClient."""
