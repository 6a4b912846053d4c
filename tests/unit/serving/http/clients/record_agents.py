"""Records what coding agents send, with long texts cut short.

``python -m tests.unit.serving.http.clients.record_agents URL MODEL [AGENT ...]`` runs agents that ``make
clients`` has installed against a server, and writes their parts of ``recorded_agents.json`` anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.clients.agents import AGENTS
from tests.clients.checks import Server

RECORDED = Path(__file__).with_name("recorded_agents.json")
_MAX_CHARS = 100


def main() -> None:
    url, model, *names = sys.argv[1:]
    recorded = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    for name in names or AGENTS:
        requests = AGENTS[name](Server(url, model, "unused"))
        recorded[name] = [_short({**request, "client": name}) for request in requests if request["body"]]
    parts = []
    for name, requests in recorded.items():
        lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in requests)
        parts.append(f'"{name}": [\n{lines}\n]')
    RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    if isinstance(value, str) and len(value) > _MAX_CHARS:
        return value[:_MAX_CHARS]
    return value


if __name__ == "__main__":
    main()
