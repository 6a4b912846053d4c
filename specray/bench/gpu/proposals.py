"""Measures a draft engine's proposals: step by step, and as one piece of captured work.

The bound is the draft's linear layers alone, once for each draft token.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from specray.bench.gpu.forwards import ForwardLoad, bounds_ms
from specray.config import EngineConfig
from specray.engine.drafting.engine import DraftEngine
from specray.engine.drafting.looped import START_LIMIT_S, LoopedProposals, looped_proposals
from specray.engine.model.decoder import DecoderForward
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.cuda_graphs import GraphedForward, run_again
from specray.engine.runner.draft_loop import loop_shapes
from specray.engine.runner.runner import ModelRunner
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.errors import ConfigError
from specray.types import Proposal, SamplingParams, SpeculateItem, Verification

_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "rejection": SamplingParams(verification=Verification.REJECTION),
}
_MAX_NUM_DRAFT_PROBS = 64
_CAPTURE_LIMIT_S = 60.0
"""Seconds for captures, longer than an engine takes: all that is measured is to be captured."""


@dataclass(frozen=True, slots=True)
class ProposalTime:
    """Milliseconds of one kind of proposal, all sequences in one batch: a median."""

    sampling: str
    num_sequences: int
    num_tokens: int
    """Draft tokens of each sequence."""
    steps_ms: float
    """Milliseconds where the host starts every forward and draw."""
    loop_ms: float
    """Milliseconds as one piece of captured work."""
    bound_ms: float
    num_equal: int
    """Proposals of the loop that equal the others."""
    num_proposals: int


@dataclass(frozen=True, slots=True)
class ProposalLoad:
    """Sizes and repetitions to measure."""

    batches: tuple[int, ...] = (1, 4, 16)
    num_tokens: tuple[int, ...] = (2, 4, 8)
    prompt_len: int = 128
    num_rounds: int = 12
    samplings: tuple[str, ...] = tuple(_SAMPLINGS)


LARGE = ProposalLoad(batches=(1, 4), num_tokens=(4,), samplings=("greedy", "coupled", "top-p 0.9"))
"""Workload for a draft as large as people serve."""
TINY = ProposalLoad(batches=(1, 2), num_tokens=(2,), prompt_len=9, num_rounds=3)


def measure(config: EngineConfig, workload: ProposalLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form.

    Raises:
        ConfigError: the draft's forward is not the decoder.
    """
    runner = _captured(build_runner(config, role="draft"))
    if not isinstance(runner.forward, DecoderForward):
        raise ConfigError(
            f"the forward of {runner.info.model_name} attends in its own way; nothing to capture"
        )
    bounds = bounds_ms(runner.forward, runner, ForwardLoad(batches=workload.batches, widths=(1,)))
    looped, captures = _captured_proposals(runner, config)
    times = []
    for name in workload.samplings:
        sampling = _SAMPLINGS[name]
        for count in workload.batches:
            for num_tokens in workload.num_tokens:
                drafts, own_ms = [], []
                for each in (None, looped):
                    engine = DraftEngine(
                        runner,
                        _info(config, runner),
                        device=runner.info.device,
                        max_num_draft_probs=_MAX_NUM_DRAFT_PROBS,
                        num_token_ids=runner.info.num_token_ids,
                        looped=each,
                    )
                    proposed, ms = _run(engine, sampling, count, num_tokens, workload)
                    drafts.append(proposed)
                    own_ms.append(ms)
                num_equal = sum(a == b for a, b in zip(*drafts, strict=True))
                bound_ms = num_tokens * bounds[count]
                times.append(
                    ProposalTime(
                        name, count, num_tokens, own_ms[0], own_ms[1], bound_ms, num_equal, len(drafts[0])
                    )
                )
    return {
        "model": runner.info.model_name,
        "captures": captures,
        "times": [asdict(entry) for entry in times],
    }


def _captured_proposals(
    runner: ModelRunner, config: EngineConfig
) -> tuple[LoopedProposals | None, dict[str, Any]]:
    """All proposals that an engine of this configuration captures, and how long that takes."""
    began = time.perf_counter()
    looped = looped_proposals(
        runner,
        max_num_draft_probs=_MAX_NUM_DRAFT_PROBS,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        limit_s=_CAPTURE_LIMIT_S,
    )
    seconds = time.perf_counter() - began
    num_captured = 0 if looped is None else len(looped.shapes)
    return looped, {
        "num_captured": num_captured,
        "num_shapes": len(loop_shapes(config.max_num_seqs, None)),
        "seconds": seconds,
        "limit_s": START_LIMIT_S,
    }


def _captured(runner: ModelRunner) -> ModelRunner:
    """The runner with captured forwards; on a CPU with such as only look like them."""
    if runner.graphs is not None or runner.info.device.type == "cuda":
        return runner
    info = runner.info
    graphs = GraphedForward(runner.forward, runner.cache, max_model_len=info.max_model_len, capture=run_again)
    return ModelRunner(runner.forward, runner.cache, info, graphs=graphs)


def _info(config: EngineConfig, runner: ModelRunner) -> EngineInfo:
    info = runner.info
    return EngineInfo(
        role="draft",
        model=info.model_name,
        vocab_size=info.vocab_size,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        protocol_version=PROTOCOL_VERSION,
    )


def _run(
    engine: DraftEngine, sampling: SamplingParams, count: int, num_tokens: int, workload: ProposalLoad
) -> tuple[list[tuple[int, ...]], float]:
    """Rounds in which all draft tokens are accepted, or none, in turns; the first two are not timed."""
    source = random.Random(0)
    # What follows is the same for both ways, so that their proposals can be compared.
    texts = [[source.randrange(2, 200) for _ in range(workload.prompt_len)] for _ in range(count)]
    sent = [0] * count
    proposed: list[tuple[int, ...]] = []
    durations = []
    for number in range(workload.num_rounds):
        items = [
            SpeculateItem(
                f"r{index}",
                number + 1,
                sent[index],
                tuple(text[sent[index] :]),
                num_tokens,
                sampling=None if sent[index] else sampling,
            )
            for index, text in enumerate(texts)
        ]
        sent = [len(text) for text in texts]
        began = time.perf_counter()
        replies = engine.speculate(items).replies
        durations.append(1e3 * (time.perf_counter() - began))
        for text, reply in zip(texts, replies, strict=True):
            assert isinstance(reply, Proposal), reply
            proposed.append(reply.draft.token_ids)
            text += [source.randrange(2, 200)] if number % 2 else [*reply.draft.token_ids, 7]
    engine.release([f"r{index}" for index in range(count)])
    return proposed, statistics.median(durations[2:])
