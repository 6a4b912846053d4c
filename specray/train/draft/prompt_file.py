"""Reads prompts of a file, each with its domain, and holds out some of each domain for the evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specray.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of prompts by domain, up to where the answer begins."""

    train: Mapping[str, Sequence[tuple[int, ...]]]
    held_out: Mapping[str, Sequence[tuple[int, ...]]]
    """Prompts that are never trained on, of each domain."""

    def shares(self) -> dict[str, float]:
        """The domains, each with its share of all prompts."""
        counts = {name: len(ids) + len(self.held_out[name]) for name, ids in self.train.items()}
        return {name: count / sum(counts.values()) for name, count in counts.items()}


def read_prompts(path: Path) -> dict[str, list[str]]:
    """Texts by domain, in the order of the file.

    Args:
        path: JSON lines; each has ``prompt``, a text, and may have ``domain``.

    Raises:
        ConfigError: the file cannot be read, or names the line that is no prompt.
    """
    found: dict[str, list[str]] = {}
    try:
        # Strings of JSON may hold other ends of lines than this one.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts is {str(path)!r}, which cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            domain, text = _parsed(line, f"--prompts is {str(path)!r}, whose line {number}")
            found.setdefault(domain, []).append(text)
    if not found:
        raise ConfigError(f"--prompts is {str(path)!r}, which holds no prompt; allowed: at least two")
    return found


def split_prompts(prompts: Mapping[str, Sequence[tuple[int, ...]]], *, seed: int) -> Prompts:
    """Holds out a tenth of each domain's prompts, at least one, as the seed chooses.

    Equal prompts are one: none is on both sides.

    Raises:
        ConfigError: a domain has less than two.
    """
    train, held_out = {}, {}
    for index, (domain, own) in enumerate(prompts.items()):
        unique = list(dict.fromkeys(own))
        if len(unique) < 2:
            raise ConfigError(
                f"domain {shown(domain)} has {len(unique)} prompts; allowed: at least 2, one to train on and "
                "one to hold out"
            )
        order = np.random.default_rng((seed, index)).permutation(len(unique))
        # Number of prompts of a domain of which one is held out.
        count = max(1, len(unique) // 10)
        held_out[domain] = [unique[place] for place in order[:count]]
        train[domain] = [unique[place] for place in order[count:]]
    return Prompts(train, held_out)


def parse_mix(text: str) -> dict[str, float]:
    """Shares of domains, of a text such as ``code=0.5,chat=0.5``; they need not add up to one.

    Raises:
        ConfigError: names the part that is no share.
    """
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not name or not 0 < share < float("inf") or name in mix:
            raise ConfigError(
                f"--mix is {shown(text)}, whose part {shown(part)} is no share; allowed: NAME=SHARE, each "
                "name once, with shares above 0"
            )
        mix[name] = share
    return mix


def _parsed(line: str, where: str) -> tuple[str, str]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip() or not _is_unicode(text):
        raise ConfigError(f"{where} has no prompt; allowed: a mapping with 'prompt', a text")
    # Domain of a prompt that names none.
    domain = entry.get("domain", "prompts")
    if not isinstance(domain, str) or not _is_name(domain):
        raise ConfigError(
            f"{where} has the domain {shown(domain)}; allowed: a text of one line without '=', ',', '|' and "
            "space around it, or none"
        )
    return domain, text


def _is_unicode(text: str) -> bool:
    """Whether a text has no halves of characters, which JSON may have and tokenizers do not take."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_name(domain: str) -> bool:
    """Whether a mix and a card's table can name it."""
    is_plain = domain.isprintable() and domain == domain.strip()
    return bool(domain) and is_plain and not any(letter in domain for letter in "=,|")
