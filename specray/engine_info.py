"""What a worker says of its engine: model, room, speed, and what it has done since its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PROTOCOL_VERSION: Final = 2
"""Version of the engines' wire protocol; peers with another are refused."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step of one width took when the engine measured itself at its start."""

    num_rows: int
    """Target: tokens of one Verify. Draft: sequences that draft side by side, one row each."""
    seconds: float
    """Target: of a Verify. Draft: per draft token. Both as ``forward_ns``, without queueing and RPC."""
    num_experts: int = 0
    """Target: distinct experts that it hit in all layers; 0: there are none, or they were not counted."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Experts of a target that is a mixture, those of all its layers together."""

    num_experts: int
    num_chosen: int
    """Experts that compute a row; at least 1, fewer than there are."""
    share: float = 0.0
    """Share of the experts in the time of a step of one row, in [0, 1); 0: it was not measured."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen < self.num_experts:
            raise ValueError(
                f"num_chosen is {self.num_chosen}; allowed: 1..{self.num_experts - 1}, fewer than num_experts"
            )
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"share is {self.share}; allowed: 0 or more, below 1")


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What grammars have cost one engine since its start."""

    compile_s: float = 0.0
    """Seconds spent on compiling."""
    mask_s: float = 0.0
    """Seconds spent on masks."""
    num_compiled: int = 0
    num_cache_hits: int = 0
    """Requests whose grammar had been compiled before."""
    num_illegal_drafts: int = 0
    """Draft tokens that a grammar forbade."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a worker says of itself, so that nothing is configured twice."""

    role: str
    """``draft`` or ``target``."""
    model: str
    vocab_size: int
    tokenizer_fingerprint: str
    """Hash of the vocabulary: draft and target must agree."""
    block_size: int
    num_blocks: int
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Most new tokens of one step over all sequences."""
    protocol_version: int
    dtype: str = ""
    tensor_parallel_size: int = 1
    num_blocks_in_use: int = 0
    """Blocks in use of ``num_blocks``, at the moment of asking; 0 when idle."""
    num_prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache since the engine started."""
    num_prefix_cache_hits: int = 0
    """Those of them that were found and not computed again."""
    num_snapshots: int = 0
    """Room for snapshots of recurrent layers' states, by which prefixes are used again; 0: there are none."""
    num_snapshots_held: int = 0
    """Snapshots that can be found, at the moment of asking."""
    num_snapshots_evicted: int = 0
    """Snapshots that gave way to others since the engine started."""
    step_times: tuple[StepTime, ...] = ()
    """Durations of steps by increasing rows; empty: the engine has not measured itself."""
    context_token_s: float = 0.0
    """Target: what a step takes longer per token that its sequences hold, all together; ``step_times`` are
    without it."""
    context_row_share: float = 0.0
    """Target: share of it that each further row of a sequence adds, in [0, 1]; 1 where attention waits for
    arithmetic, not for memory."""
    num_routers: int = 0
    """Streams that are open now."""
    busy_share: float = 0.0
    """Share of the last seconds that was spent computing, in [0, 1]."""
    experts: RoutedExperts | None = None
    """Target: what is known of its experts; None: it is no mixture, or they are not counted."""
    grammar: GrammarStats = GrammarStats()
    drafter: str = ""
    """Target: name of its own drafter, which uses its features; empty: it has none."""
    feature_drafter: str = ""
    """Draft: name of the drafter that it runs, which uses the target's features. Target: name of the drafter
    for which it gives them. Empty: neither; draft and target must agree."""
    feature_size: int = 0
    """Numbers of that drafter's row of features; 0: there is none."""
    is_deterministic: bool = False
    """Whether a row's logits have the same bits alone and in any batch, with and without speculation, on
    processors of the same ``isa``."""
    isa: str = ""
    """Name of the instruction set of the matrix products; empty: not one of ours."""
    checkpoint: str = ""
    """Digest of the model's content and of the formats in which it is computed, in hexadecimal; ``model``
    names it for people. Another digest means other outputs."""
    hardware: tuple[str, ...] = ()
    """Names of the cores or of the device that it computes on, each with its machine; empty: unknown."""
    lacks_outcomes: bool = False
    """Draft: it prepares no outcomes of a round while the target verifies."""

    adapters: tuple[bytes, ...] = ()
    """Digests of the adapters that are loaded now, 32 bytes each."""
    adapter_names: tuple[str, ...] = ()
    """Names of their folders (target), or of the adapters that they draft for (draft)."""
    max_adapters: int = 0
    """Most adapters that are loaded at a time; 0: the engine knows none, and would compute the base."""
    max_adapter_rank: int = 0
    """Most rank of an adapter; 0: the engine knows none."""

    def shares_with(self, other: EngineInfo) -> bool:
        """Both compute on the same cores or device, as far as is known."""
        return not set(self.hardware).isdisjoint(other.hardware)
