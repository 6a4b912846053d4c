"""Models: loading, lowering, the decoder written for speed, and transformers' own forward."""
