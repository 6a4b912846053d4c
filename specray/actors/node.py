"""This process's node."""

from __future__ import annotations

import ray

from specray.config import Config

LOOPBACK = "127.0.0.1"


def listen_host(config: Config) -> str:
    """Where a worker on this node listens for its router: nowhere beyond the machine unless asked."""
    return LOOPBACK if config.rpc.listen == "loopback" else str(ray.util.get_node_ip_address())
