"""Records what unmodified clients send, what they are answered, and what they make of it.

``python -m tests.unit.serving.http.clients.record`` writes ``recorded.json`` anew. It needs the packages
``openai`` and ``anthropic``, which may lie in a folder of their own on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.clients.scenarios import CHUNK_SIZE, SCENARIOS, decoded, stable, tokenizer
from tests.unit.serving.http.service import Service, serving

RECORDED = Path(__file__).with_name("recorded.json")
_NO_HEADERS = ("host", "connection", "content-length", "accept-encoding", "user-agent")
"""Headers of the connection; those of the machine begin with ``x-stainless``."""


async def _record() -> dict[str, Any]:
    return {name: await record_scenario(*scenario) for name, scenario in SCENARIOS.items()}


async def record_scenario(package: str, text: str, scenario: Any) -> dict[str, Any]:
    """Runs one scenario. Returns the client's version, and each request with its answer."""
    module = importlib.import_module(package)
    sent = list[Any]()

    async def on_request(request: Any) -> None:
        sent.append(request)

    async with serving(saying(tokenizer(), text, chunk_size=CHUNK_SIZE)) as service:
        http = module.DefaultAsyncHttpxClient(event_hooks={"request": [on_request]})
        base = f"{service.url}/v1" if package == "openai" else service.url
        make = module.AsyncOpenAI if package == "openai" else module.AsyncAnthropic
        async with make(base_url=base, api_key="sk-none", max_retries=0, http_client=http) as client:
            parsed = await scenario(client)
        exchanges = [await _exchange(service, request) for request in sent]
    parsed = [stable(_plain(value)) for value in parsed]
    return {
        "client": f"{package} {module.__version__}",
        "exchanges": [
            {**exchange, "parsed": value} for exchange, value in zip(exchanges, parsed, strict=True)
        ],
    }


async def _exchange(service: Service, request: Any) -> dict[str, Any]:
    headers = {
        name: value
        for name, value in request.headers.items()
        if name not in _NO_HEADERS and not name.startswith("x-stainless")
    }
    path = request.url.raw_path.decode()
    async with service.http.post(path, data=request.content, headers=headers) as response:
        answer = decoded(await response.text())
    return {
        "path": path,
        "headers": headers,
        "body": stable(json.loads(request.content)),
        "answer": answer,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.model_dump(mode="json", exclude_unset=True, by_alias=True, warnings=False)


def main() -> None:
    """Writes the file, a line for each scenario."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in asyncio.run(_record()).items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
