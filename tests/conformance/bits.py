"""Logits of sequences in any company, bit by bit against plain decoding of each alone, one token per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from specray.engine.inputs import SequenceInput
from specray.engine.runner.runner import ModelRunner
from specray.engine.visibility import branch_visibility, tree_visibility


class PlainLogits:
    """Logits of texts decoded alone, a token per step, without drafts.

    Args:
        runner: whose first blocks are used.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, text: Sequence[int]) -> torch.Tensor:
        """``[len(text), vocab_size]``: what follows each token."""
        known = self._known.get(tuple(text))
        if known is None:
            blocks = blocks_of(self._runner, 0, len(text))
            steps = [
                self._runner.run([SequenceInput([token], start, blocks, 1)]).logits.clone()
                for start, token in enumerate(text)
            ]
            known = self._known[tuple(text)] = torch.cat(steps)
        return known


def blocks_of(runner: ModelRunner, place: int, num_tokens: int) -> list[int]:
    """Blocks of the ``place``-th sequence of at most ``num_tokens`` tokens."""
    count = -(-num_tokens // runner.info.block_size)
    return list(range(place * count, (place + 1) * count))


def check_chunks(
    runner: ModelRunner, plain: PlainLogits, texts: Sequence[Sequence[int]], chunk: int, num_others: int
) -> None:
    """The first text among others, each in chunks of which all but the last have ``chunk`` tokens."""
    room = max(map(len, texts))
    for start in range(0, len(texts[0]), chunk):
        inputs = []
        for place, text in enumerate(texts[: 1 + num_others]):
            taken = text[start : start + chunk]
            if taken:
                inputs.append(SequenceInput(taken, start, blocks_of(runner, place + 1, room), len(taken)))
        count = len(inputs[0].token_ids)
        found, wanted = runner.run(inputs).logits[:count], plain.of(texts[0])[start : start + count]
        assert torch.equal(found, wanted), (
            f"other bits from {start} on, {num_others} others, chunks of {chunk}"
        )


@dataclass
class _Sequence:
    text: Sequence[int]
    blocks: list[int]
    num_computed: int = 0
    path: list[int] = field(default_factory=list)
    """Rows of the step that are tokens of the text."""


class RandomSchedule:
    """Steps of several texts as a service might run them, in an order that ``random`` chooses.

    Each step takes some texts: a chunk of one, or a round with a chain or a tree of draft tokens, some of
    them right. Between steps a sequence may be preempted, or take over the K/V of another's prefix.
    """

    def __init__(
        self, runner: ModelRunner, plain: PlainLogits, texts: Sequence[Sequence[int]], random: Random
    ) -> None:
        self._runner, self._plain, self._random = runner, plain, random
        self._room = max(map(len, texts)) + 40
        self._free = [blocks_of(runner, 1 + place, self._room) for place in range(2 * len(texts))]
        self._sequences = [_Sequence(text, self._free.pop()) for text in texts]

    def run(self, num_steps: int) -> None:
        """Raises AssertionError where a row has other logits than in plain decoding."""
        for _ in range(num_steps):
            unfinished = [one for one in self._sequences if one.num_computed < len(one.text)]
            if not unfinished:
                return
            taken = self._random.sample(unfinished, self._random.randint(1, len(unfinished)))
            for one in taken:
                if self._random.random() < 0.15:
                    self._restart(one)
            self._step(taken)

    def _restart(self, one: _Sequence) -> None:
        """Preempted: it starts again elsewhere, perhaps after what another has computed of its text."""
        old, one.blocks = one.blocks, self._free.pop(0)
        one.num_computed = 0
        other = self._random.choice(self._sequences)
        pairs = zip(one.text[:-1], other.text[: other.num_computed], strict=False)
        common = next((place for place, (own, its) in enumerate(pairs) if own != its), 0)
        if other is not one and common:
            self._runner.copy_tokens(other.blocks, one.blocks, common)
            one.num_computed = common
        self._free.append(old)

    def _step(self, taken: Sequence[_Sequence]) -> None:
        inputs = [self._input(one) for one in taken]
        logits = self._runner.run(inputs).logits
        first = 0
        for one, item in zip(taken, inputs, strict=True):
            found = logits[[first + row for row in one.path]]
            wanted = self._plain.of(one.text)[one.num_computed : one.num_computed + len(one.path)]
            assert torch.equal(found, wanted), (
                f"other bits than alone: {len(item.token_ids)} rows from {one.num_computed} on, of which the "
                f"text has {one.path}, tree {bool(item.visibility)}, {len(taken) - 1} others"
            )
            first += len(item.token_ids)
            self._runner.move_tokens(
                one.blocks, [one.num_computed + row for row in one.path], one.num_computed
            )
            one.num_computed += len(one.path)

    def _input(self, one: _Sequence) -> SequenceInput:
        """A chunk, or a token and what is drafted after it: right at first, then anything."""
        start, left = one.num_computed, len(one.text) - one.num_computed
        kind = self._random.choice(("chunk", "chain", "tree"))
        if kind == "chunk":
            count = self._random.randint(1, min(24, left))
            one.path = list(range(count))
            tokens = list(one.text[start : start + count])
            return SequenceInput(tokens, start, one.blocks, count)
        num_drafts, tokens = self._random.randint(0, 8), [one.text[start]]
        parents, one.path = [-1], [0]
        for node in range(1, 1 + num_drafts):
            parent = node - 1 if kind == "chain" else self._random.randrange(node)
            place = start + len(one.path)
            is_right = parent == one.path[-1] and place < len(one.text) and self._random.random() < 0.6
            tokens.append(one.text[place] if is_right else self._random.randrange(256))
            parents.append(parent)
            if is_right:
                one.path.append(node)
        if kind == "chain":
            return SequenceInput(tokens, start, one.blocks, len(tokens))
        # The row of the last known token, then the nodes that follow it.
        seen = [branch_visibility(start, start, 1)]
        seen += tree_visibility(start + 1, [parent - 1 for parent in parents[1:]])
        return SequenceInput(tokens, start, one.blocks, len(tokens), seen)


def random_texts(num_texts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Texts of about ``num_tokens`` tokens, of which some begin alike."""
    source = Random(7)
    shared = [source.randrange(vocab_size) for _ in range(num_tokens // 2)]
    texts = []
    for place in range(num_texts):
        head = shared[: source.randint(1, len(shared))] if place % 2 else []
        length = num_tokens - place % 5
        texts.append(head + [source.randrange(vocab_size) for _ in range(length - len(head))])
    return texts
