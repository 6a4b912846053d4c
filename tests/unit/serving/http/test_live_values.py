"""Tests of an Ingress whose configuration changes between two calls, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from specray.config import parse_config
from specray.config.live import LiveConfig
from specray.errors import ConfigError, OverloadedError
from specray.serving.admission.api_keys import Keyring, key_hash
from specray.serving.admission.capacity import RouterCapacity
from tests.unit.serving.http.service import MODEL, REPLY, TEXT, endless, say, serving, wait_until

KEY, OTHER_KEY = "sk-specray-" + "aB3_" * 10 + "xyz", "sk-specray-" + "Zq7-" * 10 + "uvw"


def live_config(**values: Any) -> LiveConfig:
    return LiveConfig(parse_config({"served_model_name": MODEL, **values}))


def entry(key: str, name: str = "team-a", **values: Any) -> dict[str, Any]:
    return {"name": name, "sha256": key_hash(key), **values}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_rotated_key_is_let_in_at_once_and_the_old_one_is_not() -> None:
    config = live_config(auth={"keys": [entry(KEY)]})
    async with serving(say(REPLY), config=config) as service:

        async def status(key: str | None, path: str = "/v1/models") -> int:
            headers = {} if key is None else bearer(key)
            async with service.http.get(path, headers=headers) as response:
                return response.status

        assert [await status(key) for key in (KEY, OTHER_KEY, None)] == [200, 401, 401]
        config.set({"auth": {"keys": [entry(KEY), entry(OTHER_KEY, "team-b")]}})
        assert [await status(key) for key in (KEY, OTHER_KEY, None)] == [200, 200, 401]
        config.set({"auth": {"keys": [entry(OTHER_KEY, "team-b")], "open_paths": ["/version"]}})
        assert [await status(key) for key in (KEY, OTHER_KEY, None)] == [401, 200, 401]
        assert await status(None, "/version") == 200
        # A wrong change leaves the keys as they are.
        with pytest.raises(ConfigError, match=r"auth\.keys\.0\.sha256"):
            config.set({"auth": {"keys": [entry(KEY, sha256="1")]}})
        assert [await status(key) for key in (KEY, OTHER_KEY)] == [401, 200]
        config.set({"auth": {"keys": []}})
        assert await status(None) == 200


async def test_why_it_is_not_ready_is_told_only_while_no_key_is_asked_for() -> None:
    config, client = live_config(), say(REPLY)
    client.is_ready = False
    async with serving(client, config=config) as service:

        async def message() -> str:
            async with service.http.get("/ready") as response:
                assert response.status == 503
                return str((await response.json())["error"]["message"])

        reason = await message()
        config.set({"auth": {"keys": [entry(KEY)]}})
        assert await message() == "not ready" != reason
        config.set({})
        assert await message() == reason


async def test_limits_of_bodies_and_fields_follow() -> None:
    config = live_config()
    async with serving(say(REPLY), config=config) as service:
        long = json.dumps(TEXT) + " " * 2000
        unknown = json.dumps({**TEXT, "a_field_of_nobody": 1})

        headers = {"Content-Type": "application/json"}

        async def statuses() -> list[int]:
            found = []
            for path, body in (
                ("/v1/completions", long),
                ("/tokenize", long),
                ("/v1/completions", unknown),
            ):
                async with service.http.post(path, data=body, headers=headers) as response:
                    found.append(response.status)
            return found

        assert await statuses() == [200, 400, 400]
        config.set({"http": {"max_body_bytes": 1024, "unknown_fields": "ignore"}})
        assert await statuses() == [413, 413, 200]


async def test_too_many_tokens_are_cut_or_refused_as_is_configured_now() -> None:
    config = live_config()
    async with serving(say(REPLY), config=config) as service:
        body = {**TEXT, "max_tokens": 4000}
        assert (await service.post("/v1/completions", body))[0] == 200
        config.set({"ingress": {"excess_max_tokens": "refuse"}})
        status, answer = await service.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_the_fingerprint_follows_speculation_alone() -> None:
    config = live_config()
    async with serving(say(REPLY), config=config) as service:

        async def fingerprint() -> str:
            return str((await service.post("/v1/completions", TEXT))[1]["system_fingerprint"])

        before = await fingerprint()
        config.set({"logging": {"requests": False}})
        assert await fingerprint() == before
        config.set({"speculation": {"verification": "rejection"}})
        assert await fingerprint() != before
        config.set({})
        assert await fingerprint() == before


async def test_calls_are_logged_only_while_they_are_to_be(caplog: pytest.LogCaptureFixture) -> None:
    config = live_config()

    def num_lines() -> int:
        return sum(record.getMessage() == "POST /v1/completions 200" for record in caplog.records)

    with caplog.at_level(logging.INFO, "specray"):
        async with serving(say(REPLY), config=config) as service:
            for is_logged, total in ((True, 1), (False, 1), (True, 2)):
                config.set({"logging": {"requests": is_logged}})
                assert (await service.post("/v1/completions", TEXT))[0] == 200
                await wait_until(lambda total=total: num_lines() == total)  # type: ignore[misc]


async def test_a_call_under_way_keeps_its_place_and_counts_for_the_rotated_key() -> None:
    config, router = live_config(auth={"keys": [entry(KEY, max_requests=1)]}), endless()
    async with serving(router, config=config) as service:

        async def begin() -> int:
            body = {**TEXT, "stream": True}
            async with service.http.post("/v1/completions", json=body, headers=bearer(KEY)) as response:
                await response.read()
                return response.status

        running = asyncio.create_task(begin())
        await wait_until(lambda: len(router.requests) == 1)
        config.set({"auth": {"keys": [entry(OTHER_KEY, max_requests=1)]}})
        async with service.http.post("/v1/completions", json=TEXT, headers=bearer(OTHER_KEY)) as response:
            assert response.status == 429
            assert "key 'team-a' has 1 requests in hand; allowed: 1" in await response.text()
        assert not running.done()
        running.cancel()


def test_a_key_of_another_name_begins_with_nothing_in_hand() -> None:
    config = live_config(auth={"keys": [entry(KEY, max_requests=1)]})
    keyring = Keyring(config.now.auth)
    first = keyring.identify([f"Bearer {KEY}"])
    assert (first.name, first.num_requests) == ("team-a", 0)
    config.set({"auth": {"keys": [entry(KEY, "team-b")]}})
    keyring.configure(config.now.auth)
    second = keyring.identify([f"Bearer {KEY}"])
    assert second is not first and (first.name, second.name) == ("team-a", "team-b")


def test_the_ingress_refuses_by_the_routers_new_bound() -> None:
    capacity = RouterCapacity(1)
    capacity.begin("", 0)
    with pytest.raises(OverloadedError, match="1 requests are under way; allowed: 1"):
        capacity.check("", 0)
    capacity.set_max_requests(2)
    capacity.check("", 0)
