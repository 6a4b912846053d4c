"""Checks of ``vllm bench serve``: its own functions send the requests and read the answers.

They are one file of vLLM's wheel, ``vllm/benchmarks/lib/endpoint_request_func.py``; VLLM_REQUESTS is its
path, since the wheel has 300 MB more. Without it the checks are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.clients.checks import QUESTION, SKIPPED, Server, check

MAX_TOKENS = 16


def _functions() -> ModuleType:
    path = os.environ.get("VLLM_REQUESTS")
    if path is None:
        raise RuntimeError(f"{SKIPPED}: VLLM_REQUESTS names no endpoint_request_func.py")
    spec = importlib.util.spec_from_file_location("vllm_requests", path)
    assert spec and spec.loader, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sent(server: Server, path: str, send: Callable[[ModuleType], Any], **options: Any) -> Any:
    """What the benchmark reads of an answer to the function that ``send`` chooses."""
    functions = _functions()
    asked = functions.RequestFuncInput(
        prompt=QUESTION,
        api_url=f"{server.base_url}/{path}",
        prompt_len=8,
        output_len=MAX_TOKENS,
        model=server.model,
        ignore_eos=True,
        extra_headers={"Authorization": f"Bearer {server.key}"},
        **options,
    )

    async def run() -> Any:
        async with functions.aiohttp.ClientSession() as session:
            return await send(functions)(asked, session)

    output = asyncio.run(run())
    assert output.success, output.error
    return output


@check("vllm-bench")
def bench_completions(server: Server) -> None:
    output = _sent(
        server, "completions", lambda functions: functions.async_request_openai_completions, request_id="a-1"
    )
    assert output.output_tokens == MAX_TOKENS and output.ttft > 0 and output.generated_text


@check("vllm-bench")
def bench_completions_with_logprobs_and_sampling(server: Server) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "frequency_penalty": 0.5}
    output = _sent(
        server,
        "completions",
        lambda functions: functions.async_request_openai_completions,
        logprobs=2,
        extra_body=sampling,
    )
    assert output.output_tokens == MAX_TOKENS


@check("vllm-bench")
def bench_chat(server: Server) -> None:
    output = _sent(
        server, "chat/completions", lambda functions: functions.async_request_openai_chat_completions
    )
    assert output.output_tokens == MAX_TOKENS


@check("vllm-bench")
def bench_responses(server: Server) -> None:
    _sent(server, "responses", lambda functions: functions.async_request_openai_responses)
