"""Makes the beginnings from which a target writes the text that its draft learns from.

Four kinds, so that the draft meets what a chat model is asked: the user's turn left to the model behind the
template's marker alone (Xu et al., *Magpie*, arXiv 2406.08464) or behind a few first words, a task over a
passage, and plain text or code that goes on. Passages are cut from the Python files that are installed here:
their code, and the prose of their docstrings. No benchmark's questions are used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specray.train.corpus import SourceFile
from specray.train.draft.markers import TurnMarkers

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""

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
_MIN_PROSE_CHARS = 300
_MAX_PASSAGE_CHARS = 6000
_PASSAGE_TOKENS = (48, 360)
_PLAIN_TOKENS = (24, 160)
_QUESTION_CHARS = 240
"""Characters of a question that is a passage's first paragraph, at most."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Token ids that are given, and who goes on after them."""

    token_ids: tuple[int, ...]
    goes_on: str
    """``user``, ``assistant``, or ``text`` where there are no turns."""


class Beginnings:
    """Draws beginnings, reproducibly from a seed.

    Args:
        encode: text to token ids, without special tokens.
        passages: texts to cut passages from.
        markers: what stands around turns; None: there are none, and all is plain text.
        opening: what a plain text begins with, such as the begin of a text.
        ask: a question to token ids, up to where its answer begins, where there is a template but no markers.
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
    ) -> None:
        self._markers = markers
        self._encode = encode
        self._opening = opening
        self._ask = ask
        self._passages = passages
        self._random = np.random.default_rng(seed)

    def draw(self, count: int) -> list[Beginning]:
        """Returns that many: 40 % free, 25 % behind first words, 18 % tasks, 17 % plain text.

        Without markers, questions take the place of first words and tasks, where a template asks them; all
        else is plain text.
        """
        kinds = self._random.choice(4, size=count, p=(0.40, 0.25, 0.18, 0.17))
        return [self._one(int(kind)) for kind in kinds]

    def _one(self, kind: int) -> Beginning:
        if self._markers is None and self._ask is not None and kind in (1, 2):
            return Beginning(tuple(self._ask(self._question(is_task=kind == 2))), "text")
        if self._markers is None or kind == 3:
            return Beginning((*self._opening, *self._passage(_PLAIN_TOKENS)), "text")
        opening = self._markers.opening
        if kind == 0:
            return Beginning(opening, "user")
        if kind == 1:
            words = FIRST_WORDS[int(self._random.integers(len(FIRST_WORDS)))]
            return Beginning((*opening, *self._encode(words)), "user")
        task = _TASKS[int(self._random.integers(len(_TASKS)))]
        question = (*self._encode(task + "\n\n"), *self._passage(_PASSAGE_TOKENS))
        return Beginning((*opening, *question, *self._markers.to_assistant), "assistant")

    def _question(self, *, is_task: bool) -> str:
        passage = self._text(int(self._random.integers(_QUESTION_CHARS // 4, _QUESTION_CHARS)), 1)
        if not is_task:
            return passage.partition("\n\n")[0]
        return f"{_TASKS[int(self._random.integers(len(_TASKS)))]}\n\n{passage}"

    def _passage(self, num_tokens: tuple[int, int]) -> Sequence[int]:
        wanted = int(self._random.integers(*num_tokens))
        return self._encode(self._text(4 * wanted, 2))[:wanted] or self._encode("The")

    def _text(self, num_chars: int, factor: int) -> str:
        """A piece of a passage, of about ``num_chars`` characters, and at most ``factor`` times as many."""
        text = self._passages[int(self._random.integers(len(self._passages)))]
        start = int(self._random.integers(max(len(text) - num_chars, 1)))
        # A line's or a sentence's beginning, where there is one near.
        start = max(text.rfind("\n", 0, start) + 1, text.rfind(". ", 0, start) + 1, 0)
        return text[start : start + factor * num_chars].lstrip()


def passages_of(files: Iterable[SourceFile], *, max_num_texts: int = 4000) -> list[str]:
    """Returns the beginnings of files and, as texts of their own, of their longer docstrings.

    Comments at the head of a file are left out: they are licences.
    """
    texts: list[str] = []
    for file in files:
        if len(texts) >= max_num_texts:
            break
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        found = [without_head_comment(file.text), *_docstrings(tree)]
        texts += [text[:_MAX_PASSAGE_CHARS] for text in found if len(text) >= _MIN_PROSE_CHARS]
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
