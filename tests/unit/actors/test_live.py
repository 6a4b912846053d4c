"""Tests of live values in a replica: what Serve brings, what `specray reload` brings, and what was stored."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from specray.actors import live as live_module
from specray.actors.live import LiveReplica
from specray.config import Config, parse_config
from specray.config.live import LiveConfig, digest, split
from specray.errors import ConfigError

Values = dict[str, Any]


def queue(number: int) -> Values:
    return {"router": {"max_queued_requests": number}}


def in_force(live: LiveConfig) -> int:
    return live.now.router.max_queued_requests


async def test_a_wrong_user_config_fails_a_start_and_no_running_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starting = LiveReplica(LiveConfig(parse_config({})))
    with pytest.raises(ConfigError, match=r"router\.drain_timeout_s is 1 and does not change"):
        await starting.reconfigure({"router": {"drain_timeout_s": 1}})

    live = LiveConfig(parse_config({}))
    replica = LiveReplica(live)
    await replica.reconfigure(queue(3))
    with caplog.at_level(logging.ERROR, "specray"):
        await replica.reconfigure({**queue(4), "target": {"dtype": "float32"}})
    assert in_force(live) == 3
    # Logs that another test has set up hold more.
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.getMessage().startswith(
        'user_config is refused, the values before stay in force: target is {"dtype": "float32"}'
    )
    await replica.reconfigure(queue(5))
    assert in_force(live) == 5


async def test_stored_values_go_before_user_config_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, Values | None] = {"mine": None, "other": queue(9)}
    monkeypatch.setattr(live_module, "read_stored", stored.__getitem__)
    live = LiveConfig(parse_config(queue(1)))
    replica = LiveReplica(live, store="mine")
    await replica.reconfigure({})
    assert in_force(live) == 1
    stored["mine"] = queue(2)
    # Serve calls again when a replica gets another rank.
    await replica.reconfigure({})
    assert in_force(live) == 2
    later = LiveConfig(parse_config(queue(1)))
    await LiveReplica(later, store="mine").reconfigure({})
    assert in_force(later) == 2


async def test_the_digest_confirms_all_values_and_a_refusal_leaves_them() -> None:
    live = LiveConfig(parse_config({}))
    replica = LiveReplica(live)
    _, wanted = split(parse_config(queue(2)))
    assert await replica.take(wanted) == digest(wanted)
    with pytest.raises(ConfigError, match=r"router\.max_queued_requests"):
        await replica.take(queue(-1))
    assert await replica.take(wanted) == digest(wanted)


async def test_changes_are_applied_one_after_the_other_and_only_where_there_are_any() -> None:
    applied: list[int] = []

    async def apply(config: Config) -> None:
        # The later call must not overtake this one.
        await asyncio.sleep(0.05 if not applied else 0)
        applied.append(config.router.max_queued_requests)

    replica = LiveReplica(LiveConfig(parse_config({})), apply=apply)
    await asyncio.gather(replica.take(queue(1)), replica.take(queue(2)), replica.take(queue(2)))
    assert applied == [1, 2]
