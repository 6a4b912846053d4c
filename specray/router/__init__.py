"""The router: queue, sessions and rounds. The only owner of truth about a request; it holds no tensors."""

from specray.router.router import Router
from specray.router.transport.clock import SystemClock

__all__ = ["Router", "SystemClock"]
