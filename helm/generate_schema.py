"""Writes the schema of ``specray.config.Config`` into the chart's values.schema.json, as ``config``.

Run it after a change of the configuration: ``make schema``. The rest of that file is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specray.config import Config

PATH = Path(__file__).parent / "specray" / "values.schema.json"
_COUNT = {"type": "number", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_REPLICA_OPTIONS = {
    "num_cpus": _COUNT,
    "num_gpus": _COUNT,
    "accelerator_type": {"type": "string"},
    "memory": _COUNT,
    "resources": {"type": "object", "additionalProperties": _COUNT},
    "label_selector": _STRINGS,
}
_ACTOR_OPTIONS = {
    "TargetConfig": _REPLICA_OPTIONS,
    "DraftConfig": _REPLICA_OPTIONS,
    "ModelDraftConfig": _REPLICA_OPTIONS,
    "PoolConfig": _REPLICA_OPTIONS,
    "IngressConfig": _REPLICA_OPTIONS,
}


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the chart's schema with a new part for ``config``."""
    config = _closed(Config.model_json_schema())
    definitions = config.pop("$defs")
    for name, options in _ACTOR_OPTIONS.items():
        definitions[name]["properties"]["ray_actor_options"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": options,
        }
    properties = {**schema["properties"], "config": config}
    return {**schema, "properties": properties, "$defs": {**_own(schema["$defs"]), **definitions}}


def _own(definitions: dict[str, Any]) -> dict[str, Any]:
    # Names of the chart's definitions begin with a small letter; the configuration's are class names.
    return {name: value for name, value in definitions.items() if name[0].islower()}


def _closed(schema: Any) -> Any:
    """Without titles, and with no names in a map but those that its patterns allow."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "patternProperties" in schema else {}
    return closed | {
        key: _closed(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def main() -> None:
    schema = with_config(json.loads(PATH.read_text(encoding="utf-8")))
    PATH.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
