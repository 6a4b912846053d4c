"""Messages between domain types and protobuf bytes."""
