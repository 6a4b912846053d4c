"""A target whose tokens depend on the adapter, and requests for adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specray.config.adapters import AdaptersConfig
from specray.fakes import FakeAdapterTarget
from specray.requests import AdapterRef, GenerateRequest
from tests.unit.router.harness import MODEL, TARGET_S, Pair, request

NAMES = ("sql", "chat", "code", "math", "poem")
CONFIG = AdaptersConfig(directory="/adapters", max_loaded=4, max_per_step=2)


def digest_of(text: str) -> bytes:
    return text.encode().ljust(32, b"\1")


def new_target(**options: Any) -> FakeAdapterTarget:
    options.setdefault("max_per_step", CONFIG.max_per_step)
    folders = {name: digest_of(name) for name in NAMES}
    return FakeAdapterTarget(MODEL, folders=folders, cost=lambda rows: int(TARGET_S * 1e9), **options)


def asking(name: str, request_id: str = "", *, version: str = "", **options: Any) -> GenerateRequest:
    """A request for an adapter; ``version``: of its bytes."""
    given = request(request_id or f"of-{name}", **options)
    if not name:
        return given
    ref = AdapterRef(name, digest_of(version or name), name)
    return replace(given, adapter=ref, sampling=replace(given.sampling, adapter=ref.digest))


async def outputs(pair: Pair, requests: Sequence[GenerateRequest]) -> list[tuple[int, ...]]:
    found = await asyncio.gather(*(pair.router.complete(each) for each in requests))
    return [each.token_ids for each in found]
