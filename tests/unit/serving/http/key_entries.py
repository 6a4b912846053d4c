"""API keys of the tests, and configurations that know them."""

from __future__ import annotations

from typing import Any

from specray.config import Config, parse_config
from specray.serving.admission.api_keys import key_hash
from tests.unit.serving.http.service import MODEL

KEY, OTHER_KEY = "sk-specray-" + "aB3_" * 10 + "xyz", "sk-specray-" + "Zq7-" * 10 + "uvw"
"""Keys of the form of ``new_key``; fixed, so that tests have the same names in every process."""


def config_with(*keys: dict[str, Any], **auth: Any) -> Config:
    return parse_config({"served_model_name": MODEL, "auth": {"keys": list(keys), **auth}})


def key_entry(key: str = KEY, name: str = "team-a", **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": key_hash(key), **more}
