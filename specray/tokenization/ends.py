"""Which tokens of a vocabulary end an output, by their names, where no configuration lists them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

_ENDS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)
"""Ends of a turn and of a text, as llama.cpp's reader knows them (``special_eog_ids``)."""
_FILL_IN_ENDS: Final = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""Ends of a part that was filled in, as llama.cpp's reader knows them."""
_MARKUP: Final = "</s>"
"""An end only as a control token: some vocabularies have it as a tag of HTML."""
_BESIDE_PART_END: Final = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
"""Where a vocabulary has both of a pair, ``<|end|>`` ends a part of an answer, and the answer goes on."""


def named_ends(vocabulary: Mapping[str, int], control_ids: Collection[int]) -> set[int]:
    """Ids of the tokens whose names say that they end an output; ``control_ids`` are no text."""
    found = {name: vocabulary[name] for name in (*_ENDS, *_FILL_IN_ENDS) if name in vocabulary}
    if found.get(_MARKUP) not in control_ids:
        found.pop(_MARKUP, None)
    return set(found.values())


def part_end(vocabulary: Mapping[str, int]) -> int | None:
    """The token that ends a part of an answer, such as reasoning, and not the answer; None: there is none."""
    return vocabulary.get("<|end|>") if ends_beside_parts(vocabulary) else None


def ends_beside_parts(vocabulary: Mapping[str, int]) -> set[int]:
    """The tokens that end an answer that has parts; empty: answers have none."""
    pairs = (pair for pair in _BESIDE_PART_END if all(name in vocabulary for name in pair))
    return {vocabulary[name] for pair in pairs for name in pair}
