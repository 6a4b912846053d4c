"""What ``specray advise`` is asked about: the pairs of its candidates, and the prompts as tokens."""

from __future__ import annotations

from pathlib import Path

from specray.bench.advise.candidate import short_names, split_keys
from specray.bench.advise.domains import read_domain
from specray.bench.load.prompts import Dataset, load_labelled_prompts
from specray.bench.methods.prompts import LabelledPrompt, tokenized
from specray.cli.settings import build_config, pair_options
from specray.config import EMBEDDED, Config
from specray.models.catalogue import find_known
from specray.models.drafts import compact_draft
from specray.tokenization import load_tokenizer
from specray.types import DraftKind

OWN_DRAFT = "own"
"""Candidate that the package brings for a known target."""


def pairs_of(
    target: str | None,
    drafts: list[str] | None,
    drafters: list[str] | None,
    dtype: str | None,
    max_model_len: int | None,
    settings: list[str],
) -> dict[str, Config]:
    """The configuration of each candidate, by its name. Raises ConfigError."""
    if drafts is None:
        drafts = [
            *_own_drafts(target),
            *(kind.value for kind in (DraftKind.NGRAM, DraftKind.SUFFIX, DraftKind.LOOKAHEAD)),
        ]
    found = {}
    for name, one in zip(short_names(drafts), drafts, strict=True):
        model, keys = split_keys(one)
        values = pair_options(
            target=target,
            draft=None if model == OWN_DRAFT else model,
            dtype=dtype,
            max_model_len=max_model_len,
        )
        found[name] = build_config(None, values, [*settings, *(f"draft.{key}" for key in keys)])
    for name, one in zip(short_names(drafters or []), drafters or [], strict=True):
        values = pair_options(
            target=target,
            draft=DraftKind.FEATURES.value,
            drafter=one,
            dtype=dtype,
            max_model_len=max_model_len,
        )
        found[name] = build_config(None, values, settings)
    return found


def prompts_of(
    config: Config,
    files: list[str] | None,
    dataset: Dataset,
    dataset_path: Path | None,
    num_prompts: int,
    *,
    is_chat: bool,
) -> list[LabelledPrompt]:
    """The prompts as tokens of the target, each with its domain. Raises ConfigError."""
    loaded = (
        [prompt for each in files for prompt in read_domain(each, num_prompts)]
        if files
        else load_labelled_prompts(dataset, dataset_path, num_prompts)
    )
    return tokenized(load_tokenizer(config.target.model), loaded, is_chat=is_chat)


def _own_drafts(target: str | None) -> list[str]:
    if target in (None, EMBEDDED):
        return [EMBEDDED]
    known = find_known(target)
    return [OWN_DRAFT] if known is not None and compact_draft(known) is not None else []
