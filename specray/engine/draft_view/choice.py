"""How a draft gets the target's tokens: as they are, by partners, or as text; and its engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import torch

from specray.config import Config
from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.draft_view.engine import DraftViewEngine, RetokenizingDraftEngine
from specray.engine.draft_view.sampler import partner_columns, partner_sampler
from specray.engine.inputs import SequenceInput
from specray.engine.model.description import model_path
from specray.engine.preflight import check_model
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler, make_sampler
from specray.engine.window import DraftWindow
from specray.engine_info import EngineInfo
from specray.errors import ConfigError
from specray.tokenization.pair import load_partners, partners_problem
from specray.tokenization.partners import Partners

logger = logging.getLogger(__name__)

ENOUGH_MASS = 0.5
"""Share of a draft's probability, on tokens of both vocabularies, from which on it proposes these alone."""

_SAMPLE_ROWS = 64
"""Tokens of the sample, whose logits come from one step."""


@dataclass(frozen=True, slots=True)
class OtherVocabulary:
    """A target's vocabulary that is not the draft's."""

    partners: Partners
    vocab_size: int
    """Token ids of the target."""
    fingerprint: str
    mode: Literal["intersect", "retokenize"]


def choose_vocabulary(config: Config, runner: ModelRunner) -> OtherVocabulary | None:
    """The target's vocabulary, where the draft must translate it; None: it is taken to be the draft's own.

    Args:
        config: of the pair; the target's tokenizer files must be here, or be fetched.
        runner: of the draft.

    Raises:
        ConfigError: such a pair cannot work.
    """
    mode, info = config.draft.vocabulary, runner.info
    # The configuration of a worker alone says nothing of the other's model.
    if mode == "same" or (mode == "auto" and "model" not in config.target.model_fields_set):
        return None
    try:
        target = check_model(config.target, "target")
    except ConfigError as error:
        if mode != "auto":
            raise
        logger.warning("the draft must have the target's tokenizer, which cannot be read here: %s", error)
        return None
    their_fingerprint = target.vocabulary.fingerprint
    if their_fingerprint == info.tokenizer_fingerprint:
        return None
    path = model_path(config.draft, "draft")
    partners = load_partners(path, target.path, (info.vocab_size, target.vocab_size))
    problem = partners_problem(partners, mode)
    if problem is not None:
        raise ConfigError(
            f"draft.model: {path} has another tokenizer than the target {target.path}: {problem}"
        )
    chosen: Literal["intersect", "retokenize"] = "retokenize" if mode == "retokenize" else "intersect"
    if mode == "auto":
        mass = shared_mass(runner, partners, partners.sample_ids)
        chosen = "intersect" if mass >= ENOUGH_MASS else "retokenize"
        logger.info("draft.vocabulary: %s, since %.0f %% of its probability is shared", chosen, 100 * mass)
    logger.info("the draft has another tokenizer than the target: %s", partners.overlap)
    return OtherVocabulary(partners, target.vocab_size, their_fingerprint, chosen)


def shared_mass(runner: ModelRunner, partners: Partners, token_ids: tuple[int, ...]) -> float:
    """The mean share of a draft's probability that is on tokens of both vocabularies, along a text."""
    info = runner.info
    token_ids = token_ids[: min(info.max_model_len, _SAMPLE_ROWS)]
    blocks = range(-(-len(token_ids) // info.block_size))
    output = runner.run([SequenceInput(token_ids, 0, list(blocks), len(token_ids))])
    columns, _ = partner_columns(partners.draft_ids, info.token_ids)
    probs = output.logits.float().softmax(-1)
    return float(probs[:, torch.from_numpy(columns).to(probs.device)].sum(-1).mean())


def make_draft_view_engine(
    config: Config,
    runner: ModelRunner,
    info: EngineInfo,
    other: OtherVocabulary | None,
    grammars: GrammarMasks,
    adapters: LoadedAdapters | None,
) -> DraftViewEngine:
    """The draft engine.

    Args:
        info: of the draft, in its own vocabulary.
        other: the target's vocabulary; None: it is the same.
    """
    device, max_num_draft_probs = runner.info.device, config.speculation.max_num_draft_probs
    window = None if config.draft.window is None else DraftWindow(config.draft.window)
    if other is not None and other.mode == "intersect":
        sampler: Sampler = partner_sampler(
            other.partners.draft_ids,
            device,
            vocab_size=other.vocab_size,
            max_num_draft_probs=max_num_draft_probs,
            token_ids=runner.info.token_ids,
        )
    else:
        sampler = make_sampler(
            info.vocab_size,
            device,
            max_num_draft_probs,
            num_token_ids=runner.info.num_token_ids,
            token_ids=runner.info.token_ids,
        )
    router_info = info
    is_retokenizing = other is not None and other.mode == "retokenize"
    if other is not None:
        router_info = replace(
            info,
            vocab_size=other.vocab_size,
            tokenizer_fingerprint=other.fingerprint,
            lacks_outcomes=is_retokenizing,
        )
    make = RetokenizingDraftEngine if is_retokenizing else DraftViewEngine
    return make(
        runner,
        info,
        router_info=router_info,
        device=device,
        vocabulary=None if other is None else other.partners,
        window=window,
        sampler=sampler,
        prefix_cache=config.draft.prefix_cache,
        grammars=grammars,
        adapters=adapters,
    )
