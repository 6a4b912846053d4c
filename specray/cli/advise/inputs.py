"""What ``specray advise`` is asked about: the pairs of its candidates, and the prompts as tokens."""

from __future__ import annotations

from pathlib import Path

from specray.bench.advise.candidate import short_names, split_keys
from specray.bench.advise.domains import read_domain
from specray.bench.load.prompts import Dataset, load_labelled_prompts
from specray.bench.methods.run import LabelledPrompt
from specray.cli.settings import build_config, pair_options
from specray.config import EMBEDDED, Config
from specray.tokenization import load_tokenizer
from specray.tokenization.chat import ChatMessage
from specray.types import DraftKind


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
        own = [EMBEDDED] if target in (None, EMBEDDED) else []
        drafts = [*own, *(kind.value for kind in (DraftKind.NGRAM, DraftKind.SUFFIX, DraftKind.LOOKAHEAD))]
    found = {}
    for name, one in zip(short_names(drafts), drafts, strict=True):
        model, keys = split_keys(one)
        values = pair_options(target=target, draft=model, dtype=dtype, max_model_len=max_model_len)
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
    tokenizer = load_tokenizer(config.target.model)
    has_template = is_chat and tokenizer.chat_template is not None
    return [
        LabelledPrompt(
            tokenizer.encode_chat([ChatMessage("user", one.text)])
            if has_template
            else tuple(tokenizer.encode(one.text)),
            one.category,
        )
        for one in loaded
    ]
