"""A model's files: where they lie, what they hold, and its weights, tensor by tensor."""
