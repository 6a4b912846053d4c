"""Prompts of one domain, from a file of the user's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from specray.bench.load.prompts import Prompt
from specray.errors import ConfigError


def read_domain(assignment: str, num_prompts: int) -> list[Prompt]:
    """The first prompts of a file, labelled with the name of its domain.

    Args:
        assignment: ``NAME=FILE``; each line of the file is a prompt, or JSON with ``prompt`` or ``turns``.
        num_prompts: most prompts to take.

    Raises:
        ConfigError: it is no such assignment, or the file is missing or without a prompt.
    """
    name, separator, file = assignment.partition("=")
    if not name or not separator or not file:
        raise ConfigError(f"--prompts is {assignment!r}; allowed: NAME=FILE")
    try:
        # A text may hold other ends of lines than this one.
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file}: {getattr(error, 'strerror', None) or error}") from None
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    texts = [
        _text(line, f"{file}, line {number}") for number, line in itertools.islice(numbered, num_prompts)
    ]
    if not texts:
        raise ConfigError(f"--prompts {file}: there is no prompt in it")
    return [Prompt(text, name) for text in texts]


def _text(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        # A text may begin with a brace.
        return line
    turns = entry.get("turns")
    prompt = entry.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"--prompts {where}: there is neither `prompt` nor `turns` with a text")
    return prompt
