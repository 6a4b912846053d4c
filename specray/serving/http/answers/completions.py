"""Response bodies of the completions API, whole and as events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specray.requests import FinishReason
from specray.serving.calls.prompts import Prompt
from specray.serving.generation import Delta
from specray.serving.http.responses import (
    ChunkFormat,
    Header,
    Json,
    Totals,
    finite,
    listed_prompt_logprobs,
)
from specray.tokenization import Tokenizer
from specray.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text before the output; empty without ``echo``."""
    lists_logprobs: bool = False
    """The choice has a field of its own for the prompt's logprobs, as vLLM's."""

    @property
    def is_echoed(self) -> bool:
        return bool(self.text)


def shown_prompt(
    prompt: Prompt, token_ids: tuple[int, ...], tokenizer: Tokenizer, *, is_echoed: bool, lists_logprobs: bool
) -> ShownPrompt:
    """What the choices of one prompt show of it.

    Args:
        prompt: as it was sent.
        token_ids: its tokens.
    """
    text = ""
    if is_echoed:
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    return ShownPrompt(token_ids, text, lists_logprobs)


def without_output(delta: Delta) -> Delta:
    """The delta of a request that asks about its prompt alone, without the token that it generated."""
    return replace(
        delta, text="", token_ids=(), pieces=(), logprobs=(), text_offsets=(), stop_reason=None, rounds=(),
        finish_reason=None if delta.finish_reason is None else FinishReason.LENGTH,
    )  # fmt: skip


class CompletionFormat(ChunkFormat):
    """Bodies of /v1/completions.

    Args:
        prompts: what is shown of the prompt, by choice.
    """

    def __init__(self, header: Header, tokenizer: Tokenizer, prompts: Sequence[ShownPrompt]) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._prompts = prompts

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        choices = []
        for delta in outputs:
            shown = self._prompts[delta.index]
            choice = self._choice(delta, shown.text + delta.text)
            if shown.is_echoed:
                choice["logprobs"] = self._echoed_logprobs(delta, shown)
            if shown.lists_logprobs:
                choice["prompt_logprobs"] = listed_prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
            choices.append(choice)
        return {**self._header.fields("text_completion"), "choices": choices, "usage": totals.usage()}

    def opening(self, num_choices: int, totals: Totals) -> Iterable[Json]:
        for index in range(num_choices):
            if text := self._prompts[index].text:
                yield from self.events(Delta(index, text, ()))

    def events(self, delta: Delta) -> Iterable[Json]:
        if delta.is_visible:
            yield {**self.summary(), "choices": [self._choice(delta, delta.text)]}

    def summary(self) -> Json:
        return {**self._header.fields("text_completion"), "choices": []}

    def usage(self, totals: Totals) -> Json:
        return totals.usage()

    def _choice(self, delta: Delta, text: str) -> Json:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta.logprobs, delta.text_offsets) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _echoed_logprobs(self, delta: Delta, shown: ShownPrompt) -> Json | None:
        """Logprobs of prompt and output; nothing predicts the first token, so that its own is null."""
        if not delta.prompt_logprobs and not delta.logprobs:
            return None
        offsets = self._offsets(shown.token_ids)
        after = len(shown.text)
        listed = self._logprobs(
            (*delta.prompt_logprobs, *delta.logprobs),
            (*offsets[1:], *(after + offset for offset in delta.text_offsets)),
        )
        return {
            "tokens": [self._tokenizer.token_text(shown.token_ids[0]), *listed["tokens"]],
            "token_logprobs": [None, *listed["token_logprobs"]],
            "top_logprobs": [None, *listed["top_logprobs"]],
            "text_offset": [0, *listed["text_offset"]],
        }

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        decoder = self._tokenizer.decoder()
        offsets, length = list[int](), 0
        for token_id in token_ids:
            offsets.append(length)
            length += len(decoder.push(token_id))
        return offsets

    def _logprobs(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int]) -> Json:
        name = self._tokenizer.token_text
        return {
            "tokens": [name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {name(token_id): finite(logprob) for token_id, logprob in _alternatives(entry)}
                for entry in entries
            ],
            "text_offset": list(offsets),
        }


def _alternatives(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Returns the likeliest tokens, and the chosen one too, as in OpenAI's completions API."""
    tops = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    if entry.token_id in entry.top_token_ids:
        return tops
    return [*tops, (entry.token_id, entry.logprob)]
