"""What checks of clients share: the server under test, the questions, and the list of all checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

MAX_TOKENS = 96
QUESTION = "What is the weather in Rome?"
NO_TOOLS = "does not show them to the model"
"""Part of the error that a model without tools in its template answers."""
SKIPPED = "cannot be checked here"
"""Beginning of the error of a check that lacks what it needs."""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Rome", "Paris"]
    is_sunny: bool


@dataclass(frozen=True, slots=True)
class Server:
    """Server under test."""

    url: str
    model: str
    key: str
    samples: Path | None = None
    """File for the scores that lm_eval has read; None: they are not kept."""

    @property
    def base_url(self) -> str:
        """Base URL of OpenAI's clients."""
        return f"{self.url}/v1"


Check = Callable[[Server], None]
CHECKS: dict[str, list[Check]] = {}


def check(client: str) -> Callable[[Check], Check]:
    """Registers a check of a client."""

    def register(function: Check) -> Check:
        CHECKS.setdefault(client, []).append(function)
        return function

    return register


def openai_client(server: Server) -> Any:
    """OpenAI's client, which sends nothing twice."""
    import openai

    return openai.OpenAI(base_url=server.base_url, api_key=server.key, max_retries=0, timeout=300)
