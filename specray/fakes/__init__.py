"""Fakes of every seam, for tests, simulations and benchmarks, without torch or network.

A deterministic toy language model acts as the target, guessers of chosen quality as the draft. A transport
between them delays, loses, duplicates and reorders replies by a seeded schedule, on a virtual clock.
"""

from specray.fakes.adapters import FakeAdapterTarget, adapted
from specray.fakes.client import FakeRouterClient
from specray.fakes.clock import VirtualClock
from specray.fakes.connections import (
    FakeDrafterSource,
    FakeTransport,
    LocalDrafter,
    LocalVerifier,
    ReplyQueue,
)
from specray.fakes.engines import FakeDraft, FakeTarget
from specray.fakes.models import (
    AdversarialGuesser,
    EmptyGuesser,
    NoisyGuesser,
    PerfectGuesser,
    RandomGuesser,
    ToyGuesser,
    ToyModel,
)

__all__ = [
    "AdversarialGuesser",
    "EmptyGuesser",
    "FakeAdapterTarget",
    "FakeDraft",
    "FakeDrafterSource",
    "FakeRouterClient",
    "FakeTarget",
    "FakeTransport",
    "LocalDrafter",
    "LocalVerifier",
    "NoisyGuesser",
    "PerfectGuesser",
    "RandomGuesser",
    "ReplyQueue",
    "ToyGuesser",
    "ToyModel",
    "VirtualClock",
    "adapted",
]
