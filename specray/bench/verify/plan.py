"""What ``specray verify`` compares: ways to speculate, and ways to sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PLAIN: dict[str, Any] = {"enabled": False}
SELF = "plain, other batch"
"""Name of the way that compares plain decoding with itself."""


@dataclass(frozen=True, slots=True)
class VerifyWay:
    name: str
    speculation: dict[str, Any]

    @property
    def may_be_refused(self) -> bool:
        return self.speculation is not PLAIN


@dataclass(frozen=True, slots=True)
class VerifyCase:
    name: str
    sampling: dict[str, Any]


WAYS = (
    VerifyWay(SELF, PLAIN),
    VerifyWay("as the service chooses", {}),
    VerifyWay("draft model, K=4", {"draft": "model", "num_speculative_tokens": 4}),
    VerifyWay("n-grams, K=8", {"draft": "ngram", "num_speculative_tokens": 8}),
    VerifyWay("suffixes, K=8", {"draft": "suffix", "num_speculative_tokens": 8}),
    VerifyWay("drafter on the target, K=4", {"draft": "features", "num_speculative_tokens": 4}),
)
TASK_WAYS = WAYS[:2]
"""Ways in which tasks are worked on: plain decoding at another batch, and as the service chooses."""
CASES = (
    VerifyCase("greedy", {"temperature": 0}),
    VerifyCase("coupled", {"temperature": 1}),
    VerifyCase(
        "coupled, penalties and top-p",
        {
            "temperature": 0.9,
            "top_p": 0.9,
            # Rewards: tokens come again soon, and so it shows of which prefix they are counted.
            "presence_penalty": -2,
            "frequency_penalty": 0.3,
            "repetition_penalty": 0.7,
            "min_tokens": 8,
        },
    ),
)
