"""Sampling defaults of the model's own file, by option: what a request says itself counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.errors import ConfigError
from specray.fakes import FakeRouterClient
from specray.serving.calls.defaults import load_defaults
from specray.serving.validation import GenerationOptions
from tests.unit.serving.http.service import INFO, MODEL, serving

VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 7}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def config(directory: Path, values: dict[str, Any], *, is_on: bool = True) -> Config:
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, **values}))
    return parse_config(
        {
            "served_model_name": MODEL,
            "target": {"model": str(directory)},
            "ingress": {"sampling_defaults": "model" if is_on else "none"},
        }
    )


async def test_values_reach_requests_that_leave_them_out(tmp_path: Path) -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router, config=config(tmp_path, VALUES)) as service:
        await service.post("/v1/chat/completions", CHAT)
        await service.post("/v1/chat/completions", {**CHAT, "temperature": 0, "top_k": 0, "max_tokens": 3})
        await service.post("/v1/completions", {"prompt": "a"})
    told, said, completion = router.requests
    assert (told.sampling.temperature, told.sampling.top_k, told.sampling.top_p) == (0.6, 20, 0.95)
    assert (told.sampling.repetition_penalty, told.max_tokens) == (1.05, 7)
    assert (said.sampling.temperature, said.sampling.top_k, said.max_tokens) == (0.0, 0, 3)
    assert said.sampling.top_p == 0.95
    # The completions API has a default of its own.
    assert completion.max_tokens == 16


def test_nothing_is_read_without_the_option_or_the_file(tmp_path: Path) -> None:
    options = GenerationOptions()
    assert load_defaults(config(tmp_path, VALUES, is_on=False)).apply(options) == options
    read = config(tmp_path, {})
    (tmp_path / "generation_config.json").unlink()
    assert load_defaults(read).apply(options) == options


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", 3, "0..2"),
        ("temperature", "hot", "0..2"),
        ("top_k", 1.5, "-1..2147483647"),
        ("top_p", True, "more than 0 and at most 1"),
        ("max_new_tokens", 0, "1 or more"),
    ],
)
def test_value_that_no_request_may_have_is_an_error_at_the_start(
    tmp_path: Path, name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_defaults(config(tmp_path, {name: value}))
    assert str(raised.value) == f"generation_config.json: {name} is {value!r}; allowed: {allowed}"
