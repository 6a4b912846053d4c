"""A method: what drafts for a request, and whether it proposes trees; and the figures of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from specray.draft_tokens import TreeBudget
from specray.errors import ConfigError
from specray.requests import SpeculationStats
from specray.types import DraftKind

if TYPE_CHECKING:
    from specray.config import Config

PLAIN: Final = "plain"
ALL: Final = "all"
"""Category of all prompts together."""
DEFAULT_METHODS: Final = (
    *(PLAIN, "model", "model:auto", "model:16"),
    *("cascade", "ngram", "ngram:16", "suffix", "suffix:16", "lookahead"),
)
CASCADE: Final = "cascade"
"""The draft model with a draft of its own."""
PARD: Final = "pard"
"""A draft model that predicts all draft tokens in one forward, behind masks."""
_KINDS: Final[Mapping[str, DraftKind | None]] = MappingProxyType(
    {PLAIN: None}
    | {kind.value: kind for kind in DraftKind}
    | {CASCADE: DraftKind.MODEL, PARD: DraftKind.MODEL}
)
IN_TARGET: Final = (DraftKind.LOOKAHEAD, DraftKind.FEATURES)
"""What drafts in the target's own steps: it can only be measured by serving."""
_WITHOUT_TREES: Final = (PLAIN, CASCADE, PARD, DraftKind.LOOKAHEAD.value)
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
        from specray.config import parse_config

        return self.config(parse_config({})).speculation.tree_budget

    def config(self, config: Config) -> Config:
        """The configuration of the method's router: of what the method names, and nothing beside it.

        Raises:
            ConfigError: the tree is none.
        """
        # Here, since the command line's help names the methods, and pydantic takes half a second to import.
        from specray.config import parse_config

        values = config.model_dump(mode="json")
        values["speculation"] |= {"tree": self.tree, "fallback": "none"}
        return parse_config(values)


@dataclass(slots=True)
class Tally:
    """Sums over the outputs of one method, temperature and category."""

    seconds: list[float] = field(default_factory=list)
    """By turn."""
    num_tokens: list[int] = field(default_factory=list)
    """By turn."""
    draft_s: float = 0.0
    num_rounds: int = 0
    num_spec_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    num_equal: int = 0
    num_outputs: int = 0

    def begin_turn(self) -> None:
        """All outputs are asked for once more."""
        self.seconds.append(0.0)
        self.num_tokens.append(0)

    def add(
        self, stats: SpeculationStats, *, num_tokens: int, seconds: float, draft_s: float, is_equal: bool
    ) -> None:
        """Takes an output.

        Args:
            draft_s: seconds of the draft model's steps.
            is_equal: it is plain decoding's.
        """
        self.seconds[-1] += seconds
        self.num_tokens[-1] += num_tokens
        self.draft_s += draft_s
        self.num_rounds += num_tokens - stats.num_accepted_draft_tokens
        self._count(
            stats.num_spec_steps,
            stats.num_draft_tokens,
            stats.num_accepted_draft_tokens,
            stats.acceptance_histogram,
        )
        self.num_equal += is_equal
        self.num_outputs += 1

    @classmethod
    def merged(cls, tallies: Iterable[Tally]) -> Tally:
        """All of some tallies, in one turn."""
        total = cls()
        total.begin_turn()
        for one in tallies:
            total.seconds[0] += sum(one.seconds)
            total.num_tokens[0] += sum(one.num_tokens)
            total.draft_s += one.draft_s
            total.num_rounds += one.num_rounds
            total.num_equal += one.num_equal
            total.num_outputs += one.num_outputs
            total._count(one.num_spec_steps, one.num_drafts, one.num_accepted, one.histogram)
        return total

    def _count(
        self, num_spec_steps: int, num_drafts: int, num_accepted: int, histogram: Sequence[int]
    ) -> None:
        self.num_spec_steps += num_spec_steps
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for index, count in enumerate(histogram):
            self.histogram[index] += count

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by turn."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]


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
            None if plain is None else median(tally.rates),
            None
            if plain is None
            else median(rate / base for rate, base in zip(tally.rates, plain.rates, strict=True)),
            sum(tally.num_tokens) / tally.num_rounds,
            1 + tally.num_accepted / steps if steps else None,
            by_depth(tally.histogram),
            tally.num_drafts / steps if steps else None,
            1e3 * tally.draft_s / tally.num_rounds,
            tally.num_equal,
            tally.num_outputs,
        )


def by_depth(histogram: list[int]) -> tuple[float, ...]:
    """P(one more is accepted | so many are), from the steps by their number of accepted tokens."""
    reached = [sum(histogram[count:]) for count in range(len(histogram))]
    return tuple(more / here for here, more in pairwise(reached) if here)
