"""Makes the beginnings from which a target writes the text that its draft learns from.

Either prompts of a file, or four kinds, so that the draft meets what a chat model is asked: the user's turn
left to the model after the template's marker alone (Xu et al., *Magpie*, arXiv 2406.08464) or after a few
first words, a task over a passage, and plain text or code that goes on. Passages are cut from the Python
files that are installed here: their code, and the prose of their docstrings. No benchmark's questions are
used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specray.errors import ConfigError
from specray.train.corpus import SourceFile
from specray.train.draft.markers import TurnMarkers
from specray.train.draft.prompt_file import Prompts

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""

OPEN, FIRST, TASK, TEXT = "open", "first-words", "task", "text"
OWN_MIX = {OPEN: 0.40, FIRST: 0.25, TASK: 0.18, TEXT: 0.17}
"""Shares of the kinds that need no prompts; their names are domains, as those of a file are."""

FIRST_WORDS = (
    "What is", "What are the main", "Who was", "When did", "Where is", "Why do", "How do I", "How does",
    "How many", "Which", "Can you explain", "Can you give me", "Could you help me", "Please write",
    "Write a short story about", "Write an email to", "Write a poem about", "Write a Python function that",
    "Write a blog post about", "Write a speech", "Draft a letter", "Compose a", "Describe", "Explain why",
    "Explain the difference between", "Compare", "List three", "List the", "Give me five", "Give an example",
    "Imagine you are", "Pretend to be", "You are a", "Suppose that", "Summarize", "Rewrite the sentence",
    "Translate German to English:", "Translate into French:", "Translate the following sentence:",
    "Solve the equation", "A train travels", "Tom has 12 apples.", "Calculate", "If x + y =",
    "Find the area of", "The sum of two numbers", "A store sells", "There are", "Is it true that",
    "Classify", "Extract", "Identify the", "Create a table", "Create a plan for", "Design a", "Edit the text",
    "Continue the story:", "Tell me about", "Tell me a joke", "Recommend", "What would happen if",
    "Implement", "Fix the bug in this code:", "def ", "SELECT", "I am planning", "My friend", "In which year",
)  # fmt: skip
"""Words with which a user may begin; the model writes the rest."""

_TASKS = (
    "Summarize the following text.", "Summarize: ", "Write a short summary of this passage.",
    "Answer the question with the help of the text. What is it about?", "Explain this to a beginner:",
    "List the key points of the text.", "Rewrite this text in simpler words:", "What does this code do?",
    "Give the text a title and explain it.", "Translate this text into German:",
    "Ask and answer three questions about the following text.",
)  # fmt: skip
_MAX_PASSAGES = 4000
_PASSAGE_TOKENS = (48, 360)
_PLAIN_TOKENS = (24, 160)
_HELD_OUT_EVERY, _MAX_HELD_OUT_PLACE = 10, 480
"""Distance of rows that are held out, and the place from which no more are."""
_QUESTION_CHARS = 240
"""Characters of a question that is a passage's first paragraph, at most."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Token ids that are given, and who goes on after them."""

    token_ids: tuple[int, ...]
    goes_on: str
    """``user``, ``assistant``, or ``text`` where there are no turns."""
    domain: str = TEXT
    is_held_out: bool = False
    """Its row is evaluated on, and never trained on."""


class Beginnings:
    """Draws beginnings, reproducibly from a seed.

    Args:
        encode: text to token ids, without special tokens.
        passages: texts to cut passages from.
        markers: what stands around turns; None: there are none, and all is plain text.
        opening: what a plain text begins with, such as the begin of a text.
        ask: a question to token ids, up to where its answer begins, where there is a template but no markers.
        prompts: prompts of a file; None: there are none.
        mix: shares of domains, of the file's and of ``OWN_MIX``; None: the file's as its prompts are spread,
            without a file ``OWN_MIX``.
        max_passage_len: tokens of a passage, at most: the answer needs room in its row.

    Raises:
        ConfigError: the mix names a domain that is not there, or the file has one of ``OWN_MIX``.
    """

    def __init__(
        self,
        markers: TurnMarkers | None,
        encode: Encode,
        passages: Sequence[str],
        *,
        seed: int,
        opening: tuple[int, ...] = (),
        ask: Encode | None = None,
        prompts: Prompts | None = None,
        mix: Mapping[str, float] | None = None,
        max_passage_len: int = _PASSAGE_TOKENS[1],
    ) -> None:
        self._markers = markers
        self._encode = encode
        self._opening = opening
        self._ask = ask
        self._passages = passages
        self._max_passage_len = max_passage_len
        self._prompts = prompts
        self._mix = _checked_mix(mix, prompts)
        self._random = np.random.default_rng(seed)

    def draw(self, count: int, *, first_place: int = 0) -> list[Beginning]:
        """Returns that many, of each domain its share.

        Without markers, questions take the place of first words and tasks, where a template asks them; all
        else that is no prompt is plain text.

        Args:
            first_place: rows that were drawn before: one in ten is held out, until there are 48.
        """
        names, shares = list(self._mix), np.array(list(self._mix.values()))
        kinds = self._random.choice(len(names), size=count, p=shares / shares.sum())
        return [
            self._one(names[kind], is_held_out=place % _HELD_OUT_EVERY == 0 and place < _MAX_HELD_OUT_PLACE)
            for place, kind in enumerate(kinds, first_place)
        ]

    def _one(self, domain: str, *, is_held_out: bool) -> Beginning:
        if domain not in OWN_MIX:
            assert self._prompts is not None, "the mix was checked"
            own = (self._prompts.held_out if is_held_out else self._prompts.train)[domain]
            token_ids: Sequence[int] = own[int(self._random.integers(len(own)))]
            goes_on = "text" if self._markers is None else "assistant"
        else:
            token_ids, goes_on = self._own(domain)
        return Beginning(tuple(token_ids), goes_on, domain, is_held_out)

    def _own(self, kind: str) -> tuple[Sequence[int], str]:
        if self._markers is None and self._ask is not None and kind in (FIRST, TASK):
            return self._ask(self._question(is_task=kind == TASK)), "text"
        if self._markers is None or kind == TEXT:
            return (*self._opening, *self._passage(_PLAIN_TOKENS)), "text"
        opening = self._markers.opening
        if kind == OPEN:
            return opening, "user"
        if kind == FIRST:
            words = FIRST_WORDS[int(self._random.integers(len(FIRST_WORDS)))]
            return (*opening, *self._encode(words)), "user"
        task = _TASKS[int(self._random.integers(len(_TASKS)))]
        question = (*self._encode(task + "\n\n"), *self._passage(_PASSAGE_TOKENS))
        return (*opening, *question, *self._markers.to_assistant), "assistant"

    def _question(self, *, is_task: bool) -> str:
        passage = self._text(int(self._random.integers(_QUESTION_CHARS // 4, _QUESTION_CHARS)), 1)
        if not is_task:
            return passage.partition("\n\n")[0]
        return f"{_TASKS[int(self._random.integers(len(_TASKS)))]}\n\n{passage}"

    def _passage(self, num_tokens: tuple[int, int]) -> Sequence[int]:
        most = min(num_tokens[1], self._max_passage_len + 1)
        wanted = int(self._random.integers(min(num_tokens[0], most - 1), most))
        return self._encode(self._text(4 * wanted, 2))[:wanted] or self._encode("The")

    def _text(self, num_chars: int, factor: int) -> str:
        """A piece of a passage, of about ``num_chars`` characters, and at most ``factor`` times as many."""
        text = self._passages[int(self._random.integers(len(self._passages)))]
        start = int(self._random.integers(max(len(text) - num_chars, 1)))
        # A line's or a sentence's beginning, where there is one near.
        start = max(text.rfind("\n", 0, start) + 1, text.rfind(". ", 0, start) + 1, 0)
        return text[start : start + factor * num_chars].lstrip()


def _checked_mix(mix: Mapping[str, float] | None, prompts: Prompts | None) -> Mapping[str, float]:
    shares = {} if prompts is None else prompts.shares()
    if twice := sorted(shares.keys() & OWN_MIX.keys()):
        raise ConfigError(
            f"--prompts has the domain {twice[0]!r}, a name of what the target begins itself; allowed: others"
        )
    known = [*shares, *OWN_MIX]
    if mix is not None and (other := [name for name in mix if name not in known]):
        raise ConfigError(f"--mix names {other[0]!r}; allowed: {', '.join(known)}")
    return mix or shares or OWN_MIX


def passages_of(files: Iterable[SourceFile]) -> list[str]:
    """Returns the beginnings of files and, as texts of their own, of their longer docstrings.

    Comments at the head of a file are left out: they are licences.
    """
    texts: list[str] = []
    for file in files:
        if len(texts) >= _MAX_PASSAGES:
            break
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        found = [without_head_comment(file.text), *_docstrings(tree)]
        texts += [text[:6000] for text in found if len(text) >= 300]
    return texts


def without_head_comment(text: str) -> str:
    """Returns Python source without the comment and the empty lines that it begins with."""
    lines = text.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))
    return "".join(lines[first:])


def _docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]
