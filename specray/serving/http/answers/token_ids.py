"""Adds the ids of prompt and output to answers, where a call asks for them (vLLM's ``return_token_ids``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specray.serving.generation import Delta

Json = dict[str, Any]


class TokenIds:
    """The ids in the answer to one call.

    Args:
        prompts: token ids of each prompt.
        num_choices: choices per prompt.
        is_chat: True: the only prompt's ids stand beside the choices; False: within each.
    """

    def __init__(self, prompts: Sequence[tuple[int, ...]], *, num_choices: int, is_chat: bool) -> None:
        self._prompts = prompts
        self._num_choices = num_choices
        self._is_chat = is_chat
        self._told: set[int] = set()
        """Choices whose prompt a stream has told."""
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        """Ids by choice that no event has told: those of tokens that complete no text yet."""

    def add(self, body: Json, outputs: Sequence[Delta]) -> Json:
        choices = [
            {**choice, **self._prompt_of(choice["index"]), "token_ids": list(output.token_ids)}
            for choice, output in zip(body["choices"], outputs, strict=True)
        ]
        return self._with_prompt({**body, "choices": choices}, is_first=True)

    def add_to_events(self, events: Iterable[Json], delta: Delta | None = None) -> Iterator[Json]:
        """Yields the events of a delta, or those before the first one, with the ids that their choices gain.

        A choice's first event has its prompt's.
        """
        if delta is not None:
            self._waiting[delta.index].extend(delta.token_ids)
        for event in events:
            is_first = not self._told
            choices = [self._with_ids(choice) for choice in event["choices"]]
            yield self._with_prompt({**event, "choices": choices}, is_first=is_first)

    def _with_ids(self, choice: Json) -> Json:
        index = choice["index"]
        prompt = {} if index in self._told else self._prompt_of(index)
        self._told.add(index)
        return {**choice, **prompt, "token_ids": self._waiting.pop(index, [])}

    def _prompt_of(self, index: int) -> Json:
        if self._is_chat:
            return {}
        return {"prompt_token_ids": list(self._prompts[index // self._num_choices])}

    def _with_prompt(self, body: Json, *, is_first: bool) -> Json:
        if not (self._is_chat and is_first):
            return body
        return {**body, "prompt_token_ids": list(self._prompts[0])}
