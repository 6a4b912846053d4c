"""The model in /v1/models, and the fingerprint in answers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from specray.serving.http.identity import identify
from tests.unit.serving.http.service import INFO, MAX_MODEL_LEN, MODEL, TEXT, events_of, serving

SECONDS = 1_700_000_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, text in [("config.json", "{}"), ("model.safetensors", "weights"), ("notes.txt", "x")]:
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (SECONDS, SECONDS))
    os.utime(tmp_path / "notes.txt", (SECONDS + 50, SECONDS + 50))
    return tmp_path


async def test_both_endpoints_describe_the_model_with_vllms_fields(checkpoint: Path) -> None:
    config = parse_config({"served_model_name": "org/tiny", "target": {"model": str(checkpoint)}})
    info = replace(INFO, checkpoint="0123", is_deterministic=True, isa="avx2-fma")
    async with serving(FakeRouterClient(info=info), config=config) as service:
        async with service.http.get("/v1/models") as response:
            listed = await response.json()
        async with service.http.get("/v1/models/org/tiny") as response:
            single = await response.json()
    assert listed == {"object": "list", "data": [single]}
    (permission,) = single.pop("permission")
    assert single == {
        "id": "org/tiny",
        "object": "model",
        "created": SECONDS,
        "owned_by": "specray",
        "root": str(checkpoint),
        "parent": None,
        "adapter": None,
        "max_model_len": MAX_MODEL_LEN,
        "checkpoint": "0123",
        "is_deterministic": True,
        "isa": "avx2-fma",
    }
    assert permission["id"].startswith("modelperm-") and permission["allow_sampling"] is True


def test_model_that_is_not_here_was_created_when_the_process_began() -> None:
    config = parse_config({"target": {"model": "owner/model"}})
    assert identify(config, now=lambda: 5.5).created == 5


def test_fingerprint_changes_with_all_that_outputs_depend_on(checkpoint: Path) -> None:
    values = {"target": {"model": str(checkpoint)}}

    def fingerprint(**changes: object) -> str:
        return identify(parse_config(values | changes)).system_fingerprint

    first = fingerprint()
    assert first == fingerprint() == fingerprint(http={"port": 8100})
    changed = [
        fingerprint(speculation={"num_speculative_tokens": 3}),
        fingerprint(target={**values["target"], "dtype": "float32"}),
        fingerprint(draft={"model": "ngram"}),
    ]
    (checkpoint / "config.json").write_text('{"a": 1}')
    changed.append(fingerprint())
    (checkpoint / "model.safetensors").write_text("other weights")
    changed.append(fingerprint())
    assert len({first, *changed}) == 6
    assert all(entry.startswith("fp_") and len(entry) == 19 for entry in changed)


async def test_every_answer_and_event_carries_the_fingerprint() -> None:
    expected = identify(parse_config({"served_model_name": MODEL})).system_fingerprint
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path, body in [("/v1/completions", TEXT), ("/v1/chat/completions", chat)]:
            _, answer = await service.post(path, body)
            events = await events_of(service, path, {**body, "stream": True})
            assert {entry["system_fingerprint"] for entry in (answer, *events)} == {expected}


async def test_model_may_be_left_out_or_empty() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for model in ({}, {"model": None}, {"model": ""}, {"model": MODEL}):
            status, answer = await service.post("/v1/completions", {**TEXT, **model})
            assert (status, answer["model"]) == (200, MODEL)
