"""Tests of live values: every key is live or says why not, and a wrong change leaves all as it was."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from specray.config import Config, Section, parse_config
from specray.config.live import (
    LIVE_KEYS,
    STATIC_REASONS,
    LiveConfig,
    changes,
    check_live,
    digest,
    split,
    with_live,
)
from specray.errors import ConfigError

HASH = "0123456789abcdef" * 4


def config(**values: Any) -> Config:
    return parse_config(values)


def test_every_key_is_either_live_or_has_a_reason() -> None:
    live, static = [], []
    for section, field in Config.model_fields.items():
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        assert not is_section or issubclass(kind, Section)  # type: ignore[arg-type]
        names = list(kind.model_fields) if is_section else [""]  # type: ignore[union-attr]
        for name in names:
            key = f"{section}.{name}".rstrip(".")
            is_live, is_static = (
                name in LIVE_KEYS.get(section, ()),
                bool({key, section} & set(STATIC_REASONS)),
            )
            assert is_live != is_static, key
            (live if is_live else static).append(key)
    assert len(live) == sum(map(len, LIVE_KEYS.values())) == 24
    # No reason is about a key that there is not.
    assert {key for key in STATIC_REASONS if "." in key} <= set(static)
    assert {key for key in STATIC_REASONS if "." not in key} <= set(Config.model_fields)


def test_static_and_live_values_are_the_whole_configuration() -> None:
    given = config(router={"max_queued_requests": 3, "round_timeout_s": 7.0}, logging={"level": "DEBUG"})
    static, live = split(given)
    assert live["router"] == {
        "max_queued_requests": 3,
        "max_queued_tokens": 262_144,
        "prefill_chunk_tokens": 512,
        "max_prefill_slowdown": 3.0,
        "stream_interval_ms": 20.0,
        "slo": {"ttft_ms": None, "itl_ms": None},
    }
    assert "max_queued_requests" not in static["router"] and static["router"]["round_timeout_s"] == 7.0
    assert with_live(parse_config(static), live) == given


def test_a_change_names_the_field_and_both_values() -> None:
    old = config(auth={"keys": [{"name": "a", "sha256": HASH}]})
    new = config(
        speculation={"num_speculative_tokens": 4},
        logging={"level": "WARNING"},
        auth={"keys": [{"name": "a", "sha256": HASH[::-1]}, {"name": "b", "sha256": HASH}]},
    )
    found = changes(old, new)
    assert [str(change) for change in found] == [
        'speculation.num_speculative_tokens: "auto" -> 4',
        "auth.keys: a (01234567) -> a (fedcba98), b (01234567)",
        'logging.level: null -> "WARNING"',
    ]
    check_live(found)
    assert changes(old, old) == []


def test_a_change_of_what_is_not_live_is_refused_on_one_line() -> None:
    new = config(
        target={"max_num_seqs": 8},
        router={"max_queued_requests": 3, "drain_timeout_s": 1.0},
        http={"port": 1},
    )
    with pytest.raises(ConfigError) as caught:
        check_live(changes(config(), new))
    assert str(caught.value) == (
        "target.max_num_seqs: 64 -> 8 (the target is loaded and placed by it); "
        "router.drain_timeout_s: 20.0 -> 1.0 (Serve ends replicas by it); "
        "http.port: 8000 -> 1 (the server listens there); these change only with a new start of the service"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"target": {"model": "x"}},
        'target is {"model": "x"} and does not change while serving (the target is loaded and placed by it); '
        "write it under args",
    ),
    (
        {"router": {"drain_timeout_s": 1}},
        "router.drain_timeout_s is 1 and does not change while serving (Serve ends replicas by it); "
        "write it under args",
    ),
    (
        {"speculation": {"k": 1}},
        "speculation.k is no key of the configuration; allowed here: num_speculative_tokens, verification, "
        "overlap, tree, fallback, lookahead, past_output_tokens",
    ),
    (
        {"speclation": {}},
        "speclation is no key of the configuration; allowed here: speculation, router, ingress, auth, http, "
        "chat, logging",
    ),
    ({"router": None}, "router is None; allowed: a mapping of keys that change while serving"),
    (
        {"speculation": {"num_speculative_tokens": 33}},
        "speculation: Value error, num_speculative_tokens is 33; allowed: 0..32 or auto",
    ),
]


@pytest.mark.parametrize(("values", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_in_one_sentence_and_change_nothing(
    values: dict[str, Any], says: str
) -> None:
    live, told = LiveConfig(config()), []
    live.listen(told.append)
    live.set({"logging": {"requests": False}})
    before = live.now
    with pytest.raises(ConfigError) as caught:
        live.set({"logging": {"requests": True}, **values})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert live.now is before and told == [before]


def test_values_are_laid_over_the_start_and_not_over_the_last_ones() -> None:
    live = LiveConfig(config(router={"max_queued_requests": 3}))
    assert [change.key for change in live.set({"router": {"max_queued_tokens": 5}})] == [
        "router.max_queued_tokens"
    ]
    assert live.set({"router": {"max_queued_tokens": 5}}) == []
    assert [change.key for change in live.set({})] == ["router.max_queued_tokens"]
    assert live.now == config(router={"max_queued_requests": 3})


def test_the_digest_tells_live_values_apart_whatever_their_order() -> None:
    one, other = (split(config(router={"max_queued_requests": number}))[1] for number in (1, 2))
    assert digest(one) != digest(other)
    assert digest(one) == digest(dict(reversed(one.items())))
    live = LiveConfig(config())
    live.set(yaml.safe_load("router: {max_queued_requests: 2}"))
    assert live.digest == digest(other)
