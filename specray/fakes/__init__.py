"""Scripted implementations of every seam, for tests, simulations and benchmarks: no torch, no network.

A deterministic toy language model stands for the target, drafts of chosen quality guess its tokens, and a
transport between them delays, loses, duplicates and reorders replies under a seeded schedule on a clock that
the test owns.
"""

from specray.fakes.client import FakeRouterClient
from specray.fakes.clock import VirtualClock
from specray.fakes.connections import FakeDrafterSource, LocalDrafter, LocalVerifier, ReplyQueue, Transport
from specray.fakes.engines import FakeDraft, FakeTarget
from specray.fakes.models import (
    AdversarialGuesser,
    EmptyGuesser,
    Guesser,
    NoisyGuesser,
    PerfectGuesser,
    RandomGuesser,
    ToyModel,
)

__all__ = [
    "AdversarialGuesser",
    "EmptyGuesser",
    "FakeDraft",
    "FakeDrafterSource",
    "FakeRouterClient",
    "FakeTarget",
    "Guesser",
    "LocalDrafter",
    "LocalVerifier",
    "NoisyGuesser",
    "PerfectGuesser",
    "RandomGuesser",
    "ReplyQueue",
    "ToyModel",
    "Transport",
    "VirtualClock",
]
