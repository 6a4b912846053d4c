"""What ``specray advise`` is asked about: the pairs of its candidates, and the prompts as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specray.bench.advise.candidate import short_names, split_keys
from specray.bench.advise.domains import read_domain
from specray.bench.load.prompts import load_labelled_prompts
from specray.bench.methods.prompts import LabelledPrompt, tokenized
from specray.cli.settings import build_config, pair_options
from specray.config import EMBEDDED, Config
from specray.models.catalogue import find_known
from specray.models.drafts import compact_draft
from specray.tokenization import load_tokenizer
from specray.types import DraftKind

if TYPE_CHECKING:
    from specray.cli.advise.app import CandidateOptions, PromptOptions

OWN_DRAFT = "own"
"""Candidate that goes with a known target."""


def pairs_of(given: CandidateOptions) -> dict[str, Config]:
    """The configuration of each candidate, by its name. Raises ConfigError."""
    drafts = given.draft
    if drafts is None:
        kinds = (DraftKind.NGRAM, DraftKind.SUFFIX, DraftKind.LOOKAHEAD)
        drafts = [*_own_drafts(given.target), *(kind.value for kind in kinds)]
    drafters = given.drafter or []
    found = {}
    for name, one in zip(short_names(drafts), drafts, strict=True):
        model, keys = split_keys(one)
        found[name] = _pair(given, [f"draft.{key}" for key in keys], None if model == OWN_DRAFT else model)
    for name, one in zip(short_names(drafters), drafters, strict=True):
        found[name] = _pair(given, [], DraftKind.FEATURES.value, one)
    return found


def _pair(given: CandidateOptions, keys: list[str], draft: str | None, drafter: str | None = None) -> Config:
    values = pair_options(
        target=given.target,
        draft=draft,
        drafter=drafter,
        dtype=given.dtype,
        max_model_len=given.max_model_len,
    )
    return build_config(None, values, [*(given.settings or []), *keys])


def prompts_of(config: Config, asked: PromptOptions) -> list[LabelledPrompt]:
    """The prompts as tokens of the target, each with its domain. Raises ConfigError."""
    loaded = (
        [prompt for each in asked.prompts for prompt in read_domain(each, asked.num_prompts)]
        if asked.prompts
        else load_labelled_prompts(asked.dataset, asked.dataset_path, asked.num_prompts)
    )
    return tokenized(load_tokenizer(config.target.model), loaded, is_chat=asked.chat)


def _own_drafts(target: str | None) -> list[str]:
    if target in (None, EMBEDDED):
        return [EMBEDDED]
    known = find_known(target)
    has_own = known is not None and (known.draft is not None or compact_draft(known) is not None)
    return [OWN_DRAFT] if has_own else []
