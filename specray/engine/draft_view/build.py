"""Builds the engine of a draft with its own view of requests."""

from __future__ import annotations

from dataclasses import replace

from specray.config import Config
from specray.engine.draft_view.choice import OtherVocabulary
from specray.engine.draft_view.engine import DraftViewEngine
from specray.engine.draft_view.retokenizing import RetokenizingDraftEngine
from specray.engine.draft_view.sampler import partner_sampler
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler, make_sampler
from specray.engine.window import DraftWindow
from specray.types import EngineInfo


def make_draft_view_engine(
    config: Config,
    runner: ModelRunner,
    info: EngineInfo,
    other: OtherVocabulary | None,
    grammars: GrammarMasks,
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
    if other is not None:
        router_info = replace(info, vocab_size=other.vocab_size, tokenizer_fingerprint=other.fingerprint)
    make = RetokenizingDraftEngine if other is not None and other.mode == "retokenize" else DraftViewEngine
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
    )
