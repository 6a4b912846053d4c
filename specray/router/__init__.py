"""The router: queue, sessions and rounds. The only owner of truth about a request; it holds no tensors."""

from specray.router.clock import SystemClock
from specray.router.router import Router

__all__ = ["Router", "SystemClock"]
