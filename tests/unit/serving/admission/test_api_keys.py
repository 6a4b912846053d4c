"""Tests of API keys apart from HTTP: the configuration, the command that makes them, and quotas."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from specray.bench.load.client import key_header
from specray.cli import main
from specray.config import KeyConfig, parse_config
from specray.environment import api_key
from specray.errors import ConfigError, InvalidRequestError, OverloadedError
from specray.serving.admission.api_keys import Caller, Keyring, key_hash

KEY, OTHER_KEY = "sk-specray-" + "aB3_" * 10 + "xyz", "sk-specray-" + "Zq7-" * 10 + "uvw"
"""Keys of the form of ``new_key``; fixed, so that tests have the same names in every process."""


def key_entry(key: str = KEY, name: str = "team-a", **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": key_hash(key), **more}


def test_prompt_tokens_wait_until_the_first_answer() -> None:
    caller = Caller(KeyConfig(name="a", sha256="0" * 64, max_queued_tokens=10))
    first = caller.enter()
    first.claim([30])  # Alone it is let in, whatever its size.
    with pytest.raises(OverloadedError, match="key 'a' has 30 prompt tokens waiting; allowed: 10"):
        caller.enter()
    first.answered(0)
    first.answered(0)
    second = caller.enter()
    assert (caller.num_requests, caller.num_queued_tokens) == (2, 0)
    second.claim([4, 5])
    assert (caller.num_requests, caller.num_queued_tokens) == (3, 9)
    third = caller.enter()
    third.claim([1])
    with pytest.raises(OverloadedError):
        third.claim([2])
    assert caller.num_queued_tokens == 10, "what is refused changes nothing"
    second.answered(1, is_last=True)
    assert (caller.num_requests, caller.num_queued_tokens) == (3, 5)
    for holding in (first, second, third, third):
        holding.close()
    assert (caller.num_requests, caller.num_queued_tokens) == (0, 0)


def test_quota_that_is_estimated_is_settled_exactly() -> None:
    caller = Caller(KeyConfig(name="a", sha256="0" * 64, max_requests=3, max_queued_tokens=10))
    first, second = caller.enter(), caller.enter()
    first.claim([2, 2])
    with pytest.raises(
        InvalidRequestError, match=r"number of prompts times n is 4; allowed for this key: 1\.\.3"
    ):
        second.claim([1] * 4)
    with pytest.raises(OverloadedError, match="key 'a' has 2 requests in hand; allowed: 3"):
        second.claim([1] * 2)
    with pytest.raises(OverloadedError, match="key 'a' has 3 requests in hand; allowed: 3"):
        caller.enter()
    second.claim([6])
    with pytest.raises(OverloadedError, match="key 'a' has 6 prompt tokens waiting; allowed: 10"):
        first.claim([5])
    first.claim([4])
    assert (caller.num_requests, caller.num_queued_tokens) == (2, 10)


BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"keys": [{"name": "a"}]}, "auth.keys.0.sha256: Field required"),
    ({"keys": [{"name": "a", "sha256": KEY}]}, "auth.keys.0.sha256: String should match pattern"),
    ({"keys": [{"name": "a b", "sha256": "0" * 64}]}, "auth.keys.0.name: String should match pattern"),
    ({"keys": [key_entry(), key_entry(OTHER_KEY)]}, "keys have the same name: team-a; allowed: one key each"),
    ({"keys": [key_entry(), key_entry(name="b")]}, "keys have the same sha256: b, team-a"),
    ({"keys": [key_entry(max_requests=0)]}, r"max_requests: .*greater than or equal to 1 \(got 0\)"),
    ({"keys": [{**key_entry(), "key": KEY}]}, "auth.keys.0.key: Extra inputs"),
    ({"keys": KEY}, "auth.keys"),
    ({"keys": [KEY]}, "auth.keys.0"),
    ({"open_paths": ["/v1/models"]}, "open_paths.0: .*'/metrics'.*got '/v1/models'"),
]


@pytest.mark.parametrize(("auth", "says"), BAD_KEYS, ids=lambda value: str(value)[-40:])
def test_a_wrong_key_section_is_refused_without_showing_a_key(auth: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_config({"auth": auth})
    assert KEY not in str(caught.value)


def test_keys_new_prints_a_key_and_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["keys", "new", "team-b"], ["keys", "new", "team-b"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.rpartition(" ")[2] for line in lines if line.startswith("# For the caller")]
    assert len(set(keys)) == 2 and all(len(key) >= 43 for key in keys)
    (entry,) = yaml.safe_load("\n".join(lines[:3]))
    assert entry == {"name": "team-b", "sha256": key_hash(keys[0])}
    Keyring(parse_config({"auth": {"keys": [entry]}}).auth).identify([f"Bearer {keys[0]}"])


def test_keys_new_refuses_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["keys", "new", "a b"])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert "auth.keys.0.name" in captured.err and captured.out == ""


def test_our_own_clients_take_their_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRAY_API_KEY", raising=False)
    assert key_header(api_key()) == {}
    monkeypatch.setenv("SPECRAY_API_KEY", KEY)
    assert key_header(api_key()) == {"Authorization": f"Bearer {KEY}"}


def test_a_key_is_hashed_by_plain_sha256() -> None:
    # As `printf %s KEY | sha256sum` gives it.
    assert key_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
