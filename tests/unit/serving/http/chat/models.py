"""Small chat models for tests: the embedded target's vocabulary with templates and markers of families."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from specray.demo.paths import demo_target_path
from specray.fakes import FakeRouterClient
from specray.grammar import GrammarCompiler
from specray.requests import GenerateRequest, ServiceInfo
from specray.tokenization import Tokenizer, make_stop_matcher

MAX_MODEL_LEN = 4096
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Control tokens of all templates here."""
_BODY = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }}: {{ call.function.arguments.items() | list | tojson }}){% endfor %}"
    "<|end|>{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}" + _PROMPT
)
"""A template that ignores tools; content must not be null."""
HERMES = '{# <tool_call>{"name": "f"}</tool_call> #}' + _BODY + _PROMPT
_REASONING = (
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
MAY_REASON = HERMES.replace("{{ message.content }}", _REASONING + "{{ message.content }}")
"""The model may open the reasoning itself."""
OPENS_REASONING = MAY_REASON + (
    "{% if add_generation_prompt %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
"""The template opens the reasoning; ``enable_thinking`` closes it at once."""
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": "{# <tool_call> <function= #}" + _BODY + _PROMPT,
    "mistral": "{# [TOOL_CALLS] #}" + _BODY + _PROMPT,
    "mistral_args": "{# [TOOL_CALLS] [ARGS] #}" + _BODY + _PROMPT,
    "deepseek_v31": "{# <｜tool▁calls▁begin｜> #}" + _BODY + _PROMPT,
    "llama3_json": "{# <|python_tag|> #}" + _BODY + _PROMPT,
}
"""A template of each format whose calls can be forced."""
MARKERS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
"""Markers that are special tokens, as in their models."""
WORDS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Markers that are added tokens but not special, as in their models."""


@functools.cache
def chat_tokenizer(template: str | None, *, has_markers: bool = True) -> Tokenizer:
    """The embedded target's vocabulary with this template.

    ``has_markers``: False: the markers of calls are text of several tokens.
    """
    backend = Backend.from_file(str(demo_target_path() / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in TURNS])
    if has_markers:
        backend.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
        backend.add_tokens([AddedToken(name, special=False) for name in WORDS])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=template,
        eos_token_ids=[1],
    )


def service_info(tokenizer: Tokenizer) -> ServiceInfo:
    return ServiceInfo("target", "draft", tokenizer.vocab_size, MAX_MODEL_LEN, 1, "0")


class Speaker(FakeRouterClient):
    """A router with the tokenizer of its model."""

    def __init__(
        self, tokenizer: Tokenizer, reply: Callable[[GenerateRequest], Sequence[int]], size: int
    ) -> None:
        super().__init__(
            reply=reply,
            chunk_size=size,
            info=service_info(tokenizer),
            stop_matcher_factory=make_stop_matcher(tokenizer),
        )
        self.tokenizer = tokenizer

    def prompt(self, index: int = -1) -> str:
        """The prompt of a request, with its control tokens."""
        return self.tokenizer.decode(self.requests[index].prompt_token_ids, skip_special_tokens=False)


def saying(model: Tokenizer | str, text: str, *, chunk_size: int = 1, ends: bool = True) -> Speaker:
    """A router whose model writes this text, in windows of ``chunk_size`` tokens, and then its EOS.

    ``model``: its tokenizer, or the template of its chats.
    """
    tokenizer = chat_tokenizer(model) if isinstance(model, str) else model
    tokens = (*tokenizer.encode(text, add_special_tokens=False), *([1] if ends else []))
    return Speaker(tokenizer, lambda _: tokens, chunk_size)


def babbling(model: Tokenizer | str, *, seed: int | None, chunk_size: int = 3) -> Speaker:
    """A router whose model draws from what the grammar of a request allows, each time with another seed.

    ``seed``: None: that of the request.
    """
    tokenizer = chat_tokenizer(model) if isinstance(model, str) else model
    compiler, seeds = grammar_compiler(tokenizer), itertools.count(seed or 0)

    def reply(request: GenerateRequest) -> Sequence[int]:
        assert request.sampling.grammar is not None
        matcher, chance, output = (
            compiler.matcher(request.sampling.grammar),
            random.Random(request.sampling.seed if seed is None else next(seeds)),
            list[int](),
        )
        while len(output) < min(request.max_tokens, 400):
            bits = np.unpackbits(matcher.masks(output)[0].view(np.uint8), bitorder="little")
            legal = np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()
            if 1 in legal and (legal == [1] or chance.random() < 0.5):
                return [*output, 1]
            legal = [token for token in legal if token != 1]
            output.append(chance.choice([token for token in legal if _has_ink(tokenizer, token)] or legal))
        return output

    return Speaker(tokenizer, reply, chunk_size)


@functools.cache
def grammar_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[1])


def _has_ink(tokenizer: Tokenizer, token_id: int) -> bool:
    return not tokenizer.token_bytes(token_id).isspace()
