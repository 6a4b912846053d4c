"""Records what lm_eval sends to be scored, and what it is answered.

``python -m tests.unit.serving.http.clients.record_lm_eval .venv-clients/bin/python`` writes
``recorded_lm_eval.json`` anew; the interpreter is that of ``make clients``, which runs lm_eval.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.clients.scenarios import stable, tokenizer
from tests.unit.serving.http.service import MODEL, serving

RECORDED = Path(__file__).with_name("recorded_lm_eval.json")
_CLIENT = """
import importlib.metadata, json, sys
import requests
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

base, model = sys.argv[1:]
send, exchanges = requests.Session.request, []

def recorded(session, method, url, **options):
    response = send(session, method, url, **options)
    exchange = {"method": method.upper(), "path": url.removeprefix(base), "body": options.get("json")}
    exchanges.append({**exchange, "status": response.status_code, "answer": response.json()})
    return response

requests.Session.request = recorded
scored = LocalCompletionsAPI(model=model, base_url=base + "/v1/completions", batch_size=2, max_retries=1)
pairs = [("Two and two make", " four"), ("Two and two make", " a banana"), ("", "Hello, world.")]
scores = scored.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
rolling = scored.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Hello, world.",), 0)])
print(json.dumps({
    "client": "lm_eval " + importlib.metadata.version("lm_eval"),
    "exchanges": exchanges,
    "scores": [list(score) for score in scores],
    "rolling": rolling,
}))
"""


async def _record(python: str) -> dict[str, Any]:
    async with serving(saying(tokenizer(), "Yes.")) as service:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _CLIENT, service.url, MODEL, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    recorded: dict[str, Any] = json.loads(output.splitlines()[-1])
    for exchange in recorded["exchanges"]:
        exchange["answer"] = stable(exchange["answer"])
    return recorded


def main() -> None:
    """Writes the file, a line for each exchange."""
    recorded = asyncio.run(_record(sys.argv[1]))
    lines = ",\n".join(json.dumps(exchange) for exchange in recorded.pop("exchanges"))
    head = json.dumps(recorded)[:-1]
    RECORDED.write_text(f'{head}, "exchanges": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
