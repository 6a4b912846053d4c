"""Streams beyond one machine need protection, or a word that they have none."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.errors import ConfigError

TLS = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}


@pytest.mark.parametrize("protection", [{"tls": TLS}, {"secret_file": "secret"}, {"allow_insecure": True}])
def test_streams_between_nodes_with_protection_or_by_name_are_taken(protection: dict[str, Any]) -> None:
    assert parse_config({"rpc": {"listen": "node", **protection}}).rpc.listen == "node"


@pytest.mark.parametrize("rpc", [{}, {"tls": None}, {"allow_insecure": False}])
def test_streams_between_nodes_without_protection_are_refused_by_name(rpc: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"rpc.*listen is 'node' without tls and secret_file.*allow_insecure"
    ):
        parse_config({"rpc": {"listen": "node", **rpc}})
