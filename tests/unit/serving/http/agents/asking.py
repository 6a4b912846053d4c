"""The same conversation through the three APIs that agents use, and the prompt that each makes of it."""

from __future__ import annotations

from typing import Any

from specray.config import parse_config
from specray.tokenization import Tokenizer
from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.service import MODEL, serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
CALL_ID = "call_1"


async def answered(
    path: str, tokenizer: Tokenizer, body: dict[str, Any], http: dict[str, Any] | None = None
) -> tuple[int, Any, str]:
    """Status, body and, where a request reached the router, the prompt of a call."""
    router = saying(tokenizer, "Yes")
    config = parse_config({"served_model_name": MODEL, "http": http or {}})
    needed = {"max_tokens": 50} if path == MESSAGES else {}
    async with serving(router, config=config) as service:
        status, answer = await service.post(path, {**needed, **body})
    prompt = router.requests[0].prompt_token_ids if router.requests else ()
    return status, answer, "".join(map(tokenizer.token_text, prompt))


async def prompt_of(
    path: str, tokenizer: Tokenizer, body: dict[str, Any], http: dict[str, Any] | None = None
) -> str:
    """The prompt of a call, which must be answered."""
    status, answer, prompt = await answered(path, tokenizer, body, http)
    assert status == 200, answer
    return prompt


def conversation(path: str, *messages: Any) -> dict[str, Any]:
    """Messages, or items of the Responses API, as the body of a call."""
    return {"input" if path == RESPONSES else "messages": list(messages)}


def called(path: str, arguments: Any, result: Any) -> list[Any]:
    """A call of ``f`` and its result, as the API has them."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": CALL_ID, "name": "f", "arguments": arguments}
        return [call, {"type": "function_call_output", "call_id": CALL_ID, "output": result}]
    if path == MESSAGES:
        use = {"type": "tool_use", "id": CALL_ID, "name": "f", "input": arguments}
        told = {"type": "tool_result", "tool_use_id": CALL_ID, "content": result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": CALL_ID, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": CALL_ID, "content": result},
    ]
