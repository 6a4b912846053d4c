"""The window of a draft: which of a sequence's tokens it sees, and the longest sequence that this makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specray.config import DraftConfig, EngineConfig
from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

NUM_SINKS: Final = 4
"""First tokens that a window keeps: much attention rests on them, whatever they are (arXiv 2309.17453)."""
_ROOM: Final = 4 * MAX_SPECULATIVE_TOKENS
"""Tokens after a view: those under verification, the draft's own, and where an outcome's branches lie."""


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The last tokens that a draft sees, besides the first.

    It moves on by ``stride`` tokens at a time, since all of it is computed again then: what a token's keys
    and values are depends on all before it.
    """

    num_tokens: int
    """Last tokens that the draft sees at least."""

    @property
    def stride(self) -> int:
        """Tokens by which it moves on; fewer than these are seen besides ``num_tokens``."""
        return max(1, self.num_tokens // 2)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that it makes, with room for drafting."""
        return NUM_SINKS + self.num_tokens + self.stride + _ROOM

    def start(self, length: int) -> int:
        """Start of the view's last part; 0: all are seen. Depends on the length only, so that equal prompts
        share a view."""
        start = (length - self.num_tokens) // self.stride * self.stride
        return start if start > NUM_SINKS else 0


def with_window(config: EngineConfig) -> EngineConfig:
    """The engine's configuration, with sequences no longer than its window makes them.

    Raises:
        ConfigError: ``max_model_len`` is set, and shorter.
    """
    if not isinstance(config, DraftConfig) or config.window is None:
        return config
    needed = DraftWindow(config.window).max_model_len
    if config.max_model_len is not None and config.max_model_len < needed:
        raise ConfigError(
            f"draft.max_model_len is {config.max_model_len} with draft.window {config.window}; "
            f"allowed with it: {needed} or more"
        )
    return config.model_copy(update={"max_model_len": needed})
