"""A method: what drafts for a request, and whether it proposes trees; and the figures of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Final

from specray.bench.core.arm import changed
from specray.bench.core.figures import Tally
from specray.config import Config, parse_config
from specray.draft_tokens import TreeBudget
from specray.errors import ConfigError
from specray.types import DraftKind

PLAIN: Final = "plain"
ALL: Final = "all"
"""Category of all prompts together."""
CASCADE: Final = "cascade"
"""The draft model with a draft of its own."""
PARD: Final = "pard"
"""A draft model that predicts all draft tokens in one forward, behind masks."""
SERVICE: Final = "service"
"""What the service chooses of all that it has: the draft model and n-grams."""
_KINDS: Final[Mapping[str, DraftKind | None]] = MappingProxyType(
    {PLAIN: None}
    | {kind.value: kind for kind in DraftKind}
    | {CASCADE: DraftKind.MODEL, PARD: DraftKind.MODEL, SERVICE: DraftKind.MODEL}
)
IN_TARGET: Final = (DraftKind.LOOKAHEAD, DraftKind.FEATURES)
"""What drafts in the target's own steps: it can only be measured by serving."""
_WITHOUT_TREES: Final = (PLAIN, CASCADE, PARD, SERVICE, DraftKind.LOOKAHEAD.value)
"""Plain decoding, chains, and what has no tree but its own."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method by its name: ``plain``, or a draft with ``speculation.tree`` behind a colon."""

    name: str
    draft: DraftKind | None
    """None: plain decoding."""
    tree: str = "off"
    process: str = ""
    """Name of its draft model where that is not the pair's own: CASCADE or PARD."""

    @classmethod
    def parse(cls, name: str) -> Method:
        """Reads ``plain``, ``model``, ``model:auto``, ``ngram:16`` ... Raises ConfigError."""
        kind, _, tree = name.partition(":")
        if kind not in _KINDS or (kind in _WITHOUT_TREES and tree):
            with_tree = ", ".join(kind for kind in _KINDS if kind not in _WITHOUT_TREES)
            raise ConfigError(f"--method is {name!r}; allowed: {', '.join(_KINDS)}; with :TREE: {with_tree}")
        return cls(name, _KINDS[kind], tree or "off", kind if kind in (CASCADE, PARD) else "")

    @property
    def is_in_target(self) -> bool:
        """It drafts in the target's own steps."""
        return self.draft in IN_TARGET

    @property
    def budget(self) -> TreeBudget | None:
        """The tree that is set; None: a chain, or one that is chosen. Raises ConfigError."""
        return self.config(parse_config({})).speculation.tree_budget

    def config(self, config: Config) -> Config:
        """The configuration of the method's router: of what the method names, and nothing beside it. That of
        ``service`` is the given one.

        Raises:
            ConfigError: the tree is none.
        """
        if self.name == SERVICE:
            return config
        # Here, since the command line's help names the methods, and pydantic takes half a second to import.
        return changed(config, {"speculation": {"tree": self.tree, "fallback": "none"}})


@dataclass(frozen=True, slots=True)
class MethodRow:
    """Figures of one method, temperature and category, over all turns."""

    temperature: float
    category: str
    method: str
    tokens_per_s: float | None
    """Median over the turns; None: it was not measured."""
    speedup: float | None
    """Median over the turns of tokens/s over those of plain decoding in the same turn."""
    tokens_per_round: float
    """Output tokens per step of the target."""
    acceptance_length: float | None
    """1 + accepted tokens per step with draft tokens; None: there was none."""
    acceptance_by_depth: tuple[float, ...]
    """Share of the steps in which so many draft tokens were accepted that one more could be, and was."""
    nodes_per_step: float | None
    """Draft tokens per step that had some."""
    draft_ms: float
    """Milliseconds of the draft model per step of the target."""
    num_equal: int
    """Outputs that are plain decoding's."""
    num_outputs: int

    @classmethod
    def of(
        cls, temperature: float, category: str, method: str, tally: Tally, plain: Tally | None = None
    ) -> MethodRow:
        """The figures of a tally, compared with plain decoding's. None: there are no times."""
        steps = tally.num_spec_steps
        return cls(
            temperature,
            category,
            method,
            None if plain is None else tally.tokens_per_s,
            None if plain is None else median(tally.speedups(plain)),
            tally.tokens_per_round,
            1 + tally.num_accepted / steps if steps else None,
            tally.by_depth,
            tally.num_drafts / steps if steps else None,
            1e3 * tally.draft_s / tally.num_rounds,
            tally.num_equal,
            tally.num_outputs,
        )
