"""Ray actors and deployments: placement, lifetimes, leases and health, around code that needs no Ray."""
