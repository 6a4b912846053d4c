"""The draft models of a run: the pair's own, the same with a draft of its own, and one with mask tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specray.bench.methods.method import CASCADE, PARD, PLAIN, Method
from specray.bench.plans import METHODS
from specray.config import Config
from specray.errors import ConfigError
from specray.types import DraftKind

if TYPE_CHECKING:
    from specray.bench.plans import MethodsPlan


def methods_of(plan: MethodsPlan, pard: str | None, drafter: str | None) -> list[Method]:
    """What is compared, plain decoding first if it is not named. Raises ConfigError."""
    names = plan.method or [
        *METHODS,
        *([PARD] if pard else []),
        *(["features", "features:16"] if drafter else []),
    ]
    methods = [Method.parse(name) for name in names]
    has_plain = any(method.draft is None for method in methods)
    return methods if has_plain else [Method.parse(PLAIN), *methods]


def drafts_of(
    config: Config, methods: Sequence[Method], pard: str | None
) -> tuple[Config, dict[str, Config]]:
    """The pair's configuration, and that of each further draft by the name of its method.

    Args:
        config: of the pair; its ``draft.draft`` is that of the cascade, ``ngram`` if it has none.
        pard: model with mask tokens; None: there is none.

    Raises:
        ConfigError: a method needs a draft that is not there.
    """
    own = config.draft.model_copy(update={"draft": None})
    names = {method.process for method in methods}
    others: dict[str, Config] = {}
    if CASCADE in names:
        if not config.draft.has_model:
            raise ConfigError(f"--method is {CASCADE!r}; allowed with a draft model: --draft")
        inner = config.draft.draft or DraftKind.NGRAM.value
        cascade = own.model_copy(update={"draft": inner})
        others[CASCADE] = config.model_copy(update={"draft": cascade})
    if PARD in names:
        if pard is None:
            raise ConfigError(f"--method is {PARD!r}; allowed with a model that has a pard_token: --pard")
        masked = own.model_copy(update={"model": pard, "enabled": True, "vocabulary_ids": None})
        others[PARD] = config.model_copy(update={"draft": masked})
    return config.model_copy(update={"draft": own}), others
