"""Builds engines: a runner, and the draft or target engine above it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from specray.config import Config, DraftConfig, EngineConfig, TargetConfig
from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.device import hardware_of
from specray.engine.draft_view.choice import choose_vocabulary, make_draft_view_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.drafting.guesses import Guesser, Masks, ModelGuesses, NgramGuesses
from specray.engine.drafting.looped import looped_proposals
from specray.engine.features.build import plan_drafter, send_features, tap_features
from specray.engine.features.drafting import FeatureDrafting
from specray.engine.features.remote.build import load_drafter_alone
from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.group.parallel import ParallelContext
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.description import model_path
from specray.engine.preflight import check_chains, check_tree
from specray.engine.profile import profile_draft, profile_target
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.memory import NO_DRAFTER, DrafterMemory
from specray.engine.runner.runner import ModelRunner, RunnerInfo
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.target.engine import TargetEngine
from specray.engine.window import with_window
from specray.engine_info import PROTOCOL_VERSION, EngineInfo, StepTime
from specray.errors import ConfigError
from specray.grammar import GrammarCompiler, PreparedCompiler
from specray.tokenization import load_tokenizer

logger = logging.getLogger(__name__)

_BRANCH_SEQUENCES = 1
"""Extra sequences' worth of cache for each of a draft's, for its branches, if ``cache_memory_gib`` allows."""


class Tapped(NamedTuple):
    """What a drafter asks of the target's runner."""

    feature_layers: tuple[int, ...] = ()
    drafter_memory: DrafterMemory = NO_DRAFTER


NOTHING_TAPPED = Tapped()
"""There is no drafter."""


def build_target_engine(config: Config, *, parallel: ParallelContext | None = None) -> TargetEngine:
    """Loads the target; with ``parallel``, as the leader of its group.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    plan = plan_drafter(config.target, is_remote=config.draft.reads_features)
    tapped = NOTHING_TAPPED if plan is None else Tapped(plan.feature_layers, plan.drafter_memory)
    if plan is not None and parallel is not None:
        parallel.leaders(tapped)
    runner = _build_runner(config.target, role="target", parallel=parallel, tapped=tapped)
    if runner.states is not None:
        check_chains(config)
        if config.target.prefix_cache and not runner.states.num_snapshots:
            logger.info("prefixes are not used again: the model has recurrent layers, without snapshots")
    info = _engine_info("target", config.target, runner.info)
    compiler = _grammar_compiler(config.target, "target", runner.info.vocab_size)
    grammars = GrammarMasks(compiler)
    hits = runner.forward.expert_hits if isinstance(runner.forward, DecoderForward) else None
    make_engine = partial(
        TargetEngine,
        device=runner.info.device,
        grammars=grammars,
        expert_hits=hits,
        adapters=runner.adapters,
    )
    info = replace(info, experts=None if hits is None else hits.info)
    if plan is None:
        make_engine = partial(make_engine, runner)
    elif plan.is_remote:
        sending, sender = send_features(runner, plan)
        make_engine = partial(make_engine, sending, features=sender)
        info = replace(info, feature_drafter=plan.name, feature_size=sender.feature_size)
    else:
        most = config.speculation.max_num_draft_probs
        tap, drafting = tap_features(runner, plan, grammars=grammars, max_num_draft_probs=most)
        make_engine = partial(make_engine, tap, drafting=drafting)
        info = replace(info, drafter=plan.name)
    speed = profile_target(make_engine(info), budget_s=config.target.profile_s)
    _log("target", speed.step_times)
    info = replace(
        info, step_times=speed.step_times, context_token_s=speed.context_token_s, experts=speed.experts
    )
    compiler.prepare()
    runner.cache.populate_aside()
    engine = make_engine(info, prefix_cache=config.target.prefix_cache)
    for folder in () if config.target.adapters is None else config.target.adapters.preload:
        engine.adapters.load(folder)
    return engine


def build_draft_engine(
    config: Config, *, parallel: ParallelContext | None = None
) -> DraftEngine | FeatureDraftEngine:
    """Loads the draft; with ``parallel``, as the leader of its group.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    return _build_feature_draft(config) if config.draft.reads_features else _build_draft(config, parallel)


def _build_feature_draft(config: Config) -> FeatureDraftEngine:
    loaded = load_drafter_alone(config)
    compiler = _grammar_compiler(config.target, "target", loaded.info.vocab_size)
    grammars = GrammarMasks(compiler)
    drafting = FeatureDrafting(
        loaded.drafter,
        loaded.store,
        vocab_size=loaded.info.vocab_size,
        device=loaded.device,
        max_model_len=loaded.info.max_model_len,
        num_token_ids=loaded.num_token_ids,
        max_num_draft_probs=config.speculation.max_num_draft_probs,
        grammars=grammars,
    )
    make_engine = partial(FeatureDraftEngine, loaded.drafter, loaded.store, drafting, grammars=grammars)
    step_times = profile_draft(make_engine(loaded.info), budget_s=config.draft.profile_s)
    _log("draft", step_times)
    compiler.prepare()
    return make_engine(replace(loaded.info, step_times=step_times))


def _build_draft(config: Config, parallel: ParallelContext | None) -> DraftEngine:
    inner = config.draft.inner_model
    # Before the draft, whose cache takes the memory that is left.
    inner_engine = None if inner is None else _build_inner(inner)
    runner = _build_runner(config.draft, role="draft", parallel=parallel)
    if runner.states is not None:
        check_tree(config, "draft")
    info = _engine_info("draft", config.draft, runner.info)
    other = choose_vocabulary(config, runner)
    has_own_view = other is not None or config.draft.window is not None
    if has_own_view and config.draft.draft is not None:
        raise ConfigError(
            f"draft.draft is {config.draft.draft!r} for a draft with a window or another tokenizer than the "
            "target; allowed: none"
        )
    guesser = None if has_own_view else _guesser(config.draft, runner.info, inner_engine)
    if other is None:
        compiler = _grammar_compiler(config.draft, "draft", runner.info.vocab_size)
    else:
        compiler = _grammar_compiler(config.target, "target", other.vocab_size)
    grammars = GrammarMasks(compiler)
    looped = None
    if guesser is None and not has_own_view:
        looped = looped_proposals(
            runner,
            max_num_draft_probs=config.speculation.max_num_draft_probs,
            max_num_batched_tokens=config.draft.max_num_batched_tokens,
            max_num_seqs=config.draft.max_num_seqs,
            max_num_tokens=_longest_proposal(config),
        )
    adapters, info = _own_adapters(config.draft, runner, info)
    make_engine = partial(
        DraftEngine,
        runner,
        device=runner.info.device,
        grammars=grammars,
        num_token_ids=runner.info.num_token_ids,
        token_ids=runner.info.token_ids,
        max_num_draft_probs=config.speculation.max_num_draft_probs,
        looped=looped,
        adapters=adapters,
    )
    # What its own draft saves depends on the text.
    masks = guesser if isinstance(guesser, Masks) else None
    step_times = profile_draft(make_engine(info, guesser=masks), budget_s=config.draft.profile_s)
    _log("draft", step_times)
    info = replace(info, step_times=step_times)
    compiler.prepare()
    runner.cache.populate_aside()
    if has_own_view:
        return make_draft_view_engine(config, runner, info, other, grammars, adapters)
    return make_engine(info, prefix_cache=config.draft.prefix_cache, guesser=guesser)


def _own_adapters(
    config: DraftConfig, runner: ModelRunner, info: EngineInfo
) -> tuple[LoadedAdapters | None, EngineInfo]:
    """Loads the draft's own adapters, and says what they draft for. Raises ConfigError naming one."""
    if not config.adapters:
        return None, info
    adapters, digests = LoadedAdapters(runner.adapters), []
    for name in config.adapters:
        try:
            digests.append(adapters.load(name))
        except ConfigError as error:
            raise ConfigError(f"draft.adapters: {error}") from None
    return adapters, replace(info, adapters=tuple(digests), adapter_names=tuple(config.adapters))


def _longest_proposal(config: Config) -> int | None:
    """Draft tokens of the longest proposal; None: any number, or not known yet."""
    own = config.speculation.num_speculative_tokens
    return None if own == "auto" or own == 0 else own


def _guesser(config: DraftConfig, runner: RunnerInfo, inner: DraftEngine | None) -> Guesser | None:
    """What a draft computes after a chain in one forward. Raises ConfigError for two things at once."""
    if runner.mask_token_id is not None:
        if config.draft is not None:
            raise ConfigError(
                f"draft.draft is {config.draft!r} and model {config.model!r} has a pard_token, by which it "
                "drafts in one forward; allowed: none"
            )
        logger.info("the draft predicts all draft tokens in one forward, behind masks (pard_token)")
        return Masks(runner.mask_token_id)
    if config.draft is None:
        return None
    if inner is None:
        return NgramGuesses(config.inner_draft_tokens)
    if inner.info.tokenizer_fingerprint != runner.tokenizer_fingerprint:
        raise ConfigError(
            f"draft.draft is {config.draft!r}, which has another tokenizer than the draft {config.model!r}; "
            "allowed: a model with the same vocabulary"
        )
    return ModelGuesses(inner, config.inner_draft_tokens)


def _build_inner(config: DraftConfig) -> DraftEngine:
    runner = _build_runner(config, role="draft", parallel=None)
    masks = None if runner.info.mask_token_id is None else Masks(runner.info.mask_token_id)
    return DraftEngine(
        runner,
        _engine_info("draft", config, runner.info),
        device=runner.info.device,
        num_token_ids=runner.info.num_token_ids,
        token_ids=runner.info.token_ids,
        guesser=masks,
    )


def build_follower(config: EngineConfig, *, role: str, parallel: ParallelContext) -> ModelRunner:
    """Loads the shard of a follower rank, with as many blocks as the leader, which chooses among them.

    A target's drafter is the leader's alone: the others receive what must be alike on all ranks.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
        EngineLostError: the leader of a target with a drafter is gone.
    """
    tapped = NOTHING_TAPPED
    if isinstance(config, TargetConfig) and config.drafter is not None:
        told: Tapped = parallel.leaders()
        # The room of a token decides the number of blocks. Here it is left empty, as are weights not loaded.
        tapped = Tapped(
            told.feature_layers, DrafterMemory(bytes_per_token=told.drafter_memory.bytes_per_token)
        )
    runner = _build_runner(config, role=role, parallel=parallel, tapped=tapped)
    runner.cache.populate_aside()
    return runner


def _grammar_compiler(config: EngineConfig, role: str, vocab_size: int) -> PreparedCompiler:
    """Compiler for a model's tokenizer. To prepare it earlier would disturb the measurement of step times."""

    def make() -> GrammarCompiler:
        return GrammarCompiler(load_tokenizer(model_path(config, role)), vocab_size=vocab_size)

    return PreparedCompiler(make)


def _log(role: str, step_times: Sequence[StepTime]) -> None:
    if step_times:
        listed = ", ".join(f"{entry.num_rows}: {1e3 * entry.seconds:.2f}" for entry in step_times)
        logger.info("%s step times in ms, by rows: %s", role, listed)


def _build_runner(
    config: EngineConfig, *, role: str, parallel: ParallelContext | None, tapped: Tapped = NOTHING_TAPPED
) -> ModelRunner:
    """Builds a runner with cache for every sequence, its branches, and the block of the health check."""
    config, num_branch_sequences = with_window(config), _BRANCH_SEQUENCES if role == "draft" else 0
    num_sequences = config.max_num_seqs * (1 + num_branch_sequences) + 1
    runner = build_runner(
        config.model_copy(update={"max_num_seqs": num_sequences}),
        role=role,
        parallel=parallel,
        feature_layers=tapped.feature_layers,
        drafter_memory=tapped.drafter_memory,
        # Branches, which states cannot follow, have none.
        num_state_slots=config.max_num_seqs + 1,
    )
    info = runner.info
    needed = -(-info.max_model_len // info.block_size) + 1
    if info.num_blocks < needed:
        raise ConfigError(
            f"{role}.cache_memory_gib is {config.cache_memory_gib}, room for {info.num_blocks} blocks of "
            f"{info.block_size} tokens; allowed: at least {needed} blocks, one sequence of "
            f"{info.max_model_len} tokens and a block for the health check"
        )
    return runner


def _engine_info(role: str, config: EngineConfig, runner: RunnerInfo) -> EngineInfo:
    return EngineInfo(
        role=role,
        model=runner.model_name,
        vocab_size=runner.vocab_size,
        tokenizer_fingerprint=runner.tokenizer_fingerprint,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_snapshots=runner.num_snapshots,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        protocol_version=PROTOCOL_VERSION,
        dtype=runner.number_format,
        tensor_parallel_size=runner.tensor_parallel_size,
        is_deterministic=runner.is_deterministic,
        context_row_share=runner.context_row_share,
        isa=runner.isa,
        checkpoint=runner.checkpoint,
        hardware=hardware_of(runner.device),
    )
