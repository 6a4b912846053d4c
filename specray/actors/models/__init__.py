"""Several models over Ray Serve: an application for each, and the deployment that loads and unloads them."""
