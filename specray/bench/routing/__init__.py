"""Routing by prefix against routing by load: conversations on several Routers, real and simulated."""
