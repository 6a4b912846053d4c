"""Serves ``generate()`` of transformers with as much of the completions API as the comparison needs.

``python -m specray.bench.compare.peers.generate_server --target DIR --port N``. One request at a time; others
wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, GenerationConfig

from specray.tokenization import TextStream, Tokenizer, load_tokenizer

LOOPBACK = "127.0.0.1"


class Generator:
    """A target and the way it speculates.

    Args:
        options: ``assistant_model`` or ``prompt_lookup_num_tokens`` for generate(); or none.
    """

    def __init__(self, target: Any, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
        self._target = target
        self._options = options
        self.tokenizer = tokenizer

    def prompt_token_ids(self, body: dict[str, Any]) -> Sequence[int]:
        prompt = body["prompt"]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def generate(self, body: dict[str, Any], on_tokens: Callable[[list[int]], None]) -> None:
        """Runs one request to its end; ``on_tokens`` is called in this thread for every step's tokens."""
        ids = self.prompt_token_ids(body)
        temperature = float(body.get("temperature", 1.0))
        eos = None if body.get("ignore_eos") else list(self.tokenizer.eos_token_ids)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=body.get("max_tokens", 16), eos_token_id=eos, pad_token_id=0, **sampling
        )
        input_ids = torch.tensor([list(ids)])
        with torch.inference_mode():
            self._target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                streamer=_Streamer(on_tokens),
                **self._options,
            )


class _Streamer:
    """The ``streamer`` of generate(), which passes it the prompt first."""

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self._on_tokens = on_tokens
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._on_tokens(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Does nothing: the call returns right after it."""


def load_generator(arguments: argparse.Namespace) -> Generator:
    """Loads the checkpoints in bfloat16."""
    torch.set_num_threads(arguments.num_threads)
    target = _load(arguments.target)
    options: dict[str, Any] = {}
    if arguments.draft is not None:
        draft = _load(arguments.draft)
        draft.generation_config.num_assistant_tokens = arguments.num_speculative_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        # Every round drafts K tokens, however sure the draft is of them, as with the other peers.
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    if arguments.prompt_lookup is not None:
        options["prompt_lookup_num_tokens"] = arguments.prompt_lookup
    return Generator(target, load_tokenizer(arguments.target), options)


def _load(checkpoint: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    # generate() takes missing options from the model's configuration: no end of sequence there.
    model.generation_config.eos_token_id = None
    return model.eval()


def build_app(generator: Generator) -> web.Application:
    """Builds the application: /health, /v1/models and a streaming /v1/completions."""
    turn = asyncio.Lock()

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "target", "object": "model"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with turn:
            await _stream(generator, body, response)
        return response

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/completions", completions)])
    return app


async def _stream(generator: Generator, body: dict[str, Any], response: web.StreamResponse) -> None:
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[list[int] | None] = asyncio.Queue()

    def put(token_ids: list[int] | None) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, token_ids)

    def work() -> None:
        try:
            generator.generate(body, put)
        finally:
            put(None)

    prompt_token_ids = generator.prompt_token_ids(body)
    text = TextStream(generator.tokenizer, prompt_token_ids=prompt_token_ids)
    num_tokens = 0
    running = loop.run_in_executor(None, work)
    while (token_ids := await steps.get()) is not None:
        num_tokens += len(token_ids)
        await _send(response, {"choices": [{"index": 0, "text": text.push(token_ids)}]})
    await running
    rest = [{"index": 0, "text": text.finish()}]
    await _send(response, {"choices": rest, "usage": _usage(len(prompt_token_ids), num_tokens)})
    await response.write(b"data: [DONE]\n\n")


def _usage(num_prompt: int, num_output: int) -> dict[str, int]:
    total = num_prompt + num_output
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": total}


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--prompt-lookup", type=int)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args(arguments)


def main() -> None:
    """Loads the models and serves until a signal."""
    arguments = parse_arguments()
    web.run_app(build_app(load_generator(arguments)), host=LOOPBACK, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
