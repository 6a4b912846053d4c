"""Ray nodes that this package starts itself."""
