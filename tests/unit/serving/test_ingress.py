"""Tests of the order in which an Ingress begins: no server listens before the keys in force are known."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from specray.actors.live import LiveReplica
from specray.config import parse_config
from specray.config.live import LiveConfig
from specray.errors import ConfigError
from specray.serving.ingress import IngressReplica, IngressServers

AUTH = {"auth": {"keys": [{"name": "team-a", "sha256": "0" * 64}]}}


class Recorder:
    """Starters of two servers, which record what happens."""

    def __init__(self, live: LiveConfig) -> None:
        self.live = live
        self.events: list[str] = []
        self.num_ending = 0

    async def start(self, name: str, stack: AsyncExitStack) -> None:
        keys = [key.name for key in self.live.now.auth.keys]
        self.events.append(f"{name} starts with {keys}")
        stack.push_async_callback(self._end, name)

    async def _end(self, name: str) -> None:
        # Each waits for the other: they end at the same time, or never.
        self.num_ending += 1
        async with asyncio.timeout(20):
            while self.num_ending < 2:  # noqa: ASYNC110  # What is watched has no event.
                await asyncio.sleep(0.001)
        self.events.append(f"{name} ends")


def ingress(live: LiveConfig) -> tuple[Any, Recorder]:
    """An Ingress without Ray, as it is when its application has begun."""
    recorder = Recorder(live)
    replica = object.__new__(IngressReplica)
    replica._live = LiveReplica(live)
    replica._servers = IngressServers(
        lambda stack: recorder.start("grpc", stack), lambda stack: recorder.start("http", stack)
    )
    return replica, recorder


async def test_servers_start_once_and_with_the_keys_of_user_config() -> None:
    replica, recorder = ingress(LiveConfig(parse_config({})))
    await replica.reconfigure(AUTH)
    await replica.reconfigure({})
    assert recorder.events == ["grpc starts with ['team-a']", "http starts with ['team-a']"]
    await replica._servers.stop()
    assert set(recorder.events[2:]) == {"grpc ends", "http ends"}


async def test_nothing_listens_when_user_config_is_wrong() -> None:
    replica, recorder = ingress(LiveConfig(parse_config({})))
    with pytest.raises(ConfigError, match=r"grpc is .* and does not change while serving"):
        await replica.reconfigure({**AUTH, "grpc": {"port": 1}})
    assert recorder.events == []
    await replica._servers.stop()
