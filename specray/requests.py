"""The vocabulary of requests: what the Ingress says to the router, and what it gets back.

The types are plain and frozen, as in ``specray.types``, which has what engines receive.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from specray.prefix_keys import root_key
from specray.round_reports import RoundReport
from specray.types import DraftKind, SamplingParams, TokenLogprobs


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Wishes of one request for speculation; None leaves the choice to the service."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    draft: DraftKind | None = None
    tenant: str = ""
    """Tenant whose past outputs ``suffix`` may propose from, and who gets this one; empty: none."""
    prediction: tuple[int, ...] = ()
    """Token ids of a text that the output is expected to be close to; empty: none."""
    reports_rounds: bool = False
    """The chunks of the output report its rounds."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Times that a caller wants, as far as those without a level, or with room, can give way."""

    ttft_ms: float | None = None
    """Milliseconds from arrival to the first token, > 0; None: any."""
    itl_ms: float | None = None
    """Milliseconds per output token after the first, on average, > 0; None: any."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of what the requests of one API key hold at a time of each router; None: no limit."""

    name: str
    """Name of the key, for people."""
    max_requests: int | None = None
    max_queued_tokens: int | None = None
    """Prompt tokens of requests that wait."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The part of an output that a lost router had committed: the caller has it, and gets what follows."""

    token_ids: tuple[int, ...]
    """Committed output tokens, at least one."""
    checkpoint: str
    """Digest of the target that wrote them (``EngineInfo.checkpoint``); no other may go on."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The way in which an Ingress writes an output's tokens as text."""

    skip_special_tokens: bool = True
    """False: special tokens are text, too."""
    include_stop: bool = False
    """True: what ended the output, a stop string or the text of a stop token, is the end of the text."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are text though others are skipped: those that mark reasoning and calls."""


ADAPTER_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as a request names it. Other bytes under the same name are another adapter."""

    name: str
    """Name for people."""
    digest: bytes
    """Digest of its bytes, 32 bytes."""
    folder: str
    """Name of its folder in ``target.adapters.directory``."""
    is_pinned: bool = False
    """It leaves the engine's memory only when it is told to."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Ingress to router: one prompt, one output. ``n`` and lists of prompts are several of these."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """Most output tokens, >= 1; prompt and output together fit the target's max_model_len."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; matched on the text of the output."""
    eos_token_ids: tuple[int, ...] = ()
    """Those of ``sampling.stop_token_ids`` that mean end-of-sequence: they give no stop_reason."""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    """Priority, as in vLLM: lower is served earlier; within one priority tenants are served fairly."""
    timeout_s: float | None = None
    """Seconds from arrival at the router to the last token, > 0; None: as long as the service allows."""
    quota: Quota | None = None
    """Limits of the key that the request came with; None: it came without, or the key has no limits."""
    traceparent: str = ""
    """W3C trace context under which the router's spans are to stand; empty: nobody traces this request."""
    resumed: Resumption | None = None
    """Earlier part of the output; None: the output begins here."""
    text: TextOptions = field(default_factory=TextOptions)
    level: ServiceLevel | None = None
    """Times that the caller wants; None: none."""
    session: str = ""
    """What ties requests together where routers are equal otherwise; empty: nothing."""
    adapter: AdapterRef | None = None
    """The adapter whose digest is ``sampling.adapter``; None: the base."""

    @property
    def tenant(self) -> str:
        """Who shares the service fairly with others; all that name nobody are one."""
        return self.speculation.tenant

    @property
    def prefix_root(self) -> bytes:
        """What stands before the first unit of the prompt, see ``prefix_keys``."""
        return root_key(self.sampling.cache_salt, adapter=self.sampling.adapter)


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A request's counters with vLLM's meaning; the rates follow from them."""

    num_spec_steps: int = 0
    """Rounds that verified at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    """Entry n: rounds with n accepted tokens; as long as the longest proposal plus one."""
    num_accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that are part of the output."""
    num_rejected_prediction_tokens: int = 0
    """Tokens of the request's prediction that are not."""

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over draft tokens; None before the first."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens per round: includes the recovered or bonus token, by convention."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else None


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """How busy a router is, for those who choose between routers."""

    number: int = 0
    """Number of the figures: later ones of the same router have higher numbers."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are to be computed before those of a new request."""
    num_running: int = 0
    """Requests that run, and those that wait for a place."""
    num_places: int = 0
    """Most requests that run at once; 0: unknown."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens per second; 0: unknown."""
    step_s: float = 0.0
    """Seconds of a step of those that run; 0: unknown."""
    num_cache_tokens: int = 0
    """Tokens that fit the target's cache; 0: unknown."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Router to ingress: newly committed tokens of one request, in order, each exactly once.

    A stop token that ended the output is the last of ``token_ids``; it is no part of the text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Present on the last chunk only; never ``error``: a request that fails raises an exception."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the output (None for end-of-sequence)."""
    stats: SpeculationStats | None = None
    """Counters of the request, on the last chunk only."""
    num_cached_tokens: int = 0
    """Prompt tokens that the target found in its prefix cache, on the last chunk only."""
    ttft_s: float | None = None
    """Seconds from the request's arrival at the router to its first tokens, on the last chunk only; None: it
    had none, or another router had committed them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the prompt's tokens but the first, on the last chunk only, where they were asked for."""
    rounds: tuple[RoundReport, ...] = ()
    """Rounds that brought the tokens, where they were asked for."""
    checkpoint: str = ""
    """Digest of the target that writes the output (``EngineInfo.checkpoint``), on the first chunk only."""
    load: RouterLoad | None = None
    """How busy the router is, on the first and the last chunk of a stream."""


@dataclass(frozen=True, slots=True)
class RequestLife:
    """A router's record of a request that has ended, for tracers. Seconds are on the router's clock."""

    request_id: str
    traceparent: str
    arrived_s: float
    admitted_s: float | None
    """Time at which it left the queue for the first time; None: never."""
    first_token_s: float | None
    """Time at which its first tokens were committed; None: never."""
    ended_s: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_rounds: int
    """Verdicts, with or without draft tokens."""
    num_preemptions: int
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One of several models behind one address."""

    name: str
    aliases: tuple[str, ...] = ()
    state: str = ""
    """Whether it is loaded, see ``ModelState``."""


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """Models of a service, and its limits."""

    model: str
    draft_model: str | None
    vocab_size: int
    max_model_len: int
    protocol_version: int
    version: str
    checkpoint: str = ""
    """Digest of the target (``EngineInfo.checkpoint``)."""
    is_deterministic: bool = False
    """Whether outputs depend neither on other requests nor on speculation, on processors of ``isa``."""
    isa: str = ""
    """Instruction set of the target's matrix products; empty: not one of ours."""
    models: tuple[ServedModel, ...] = ()
    """All of several models, of which the fields above describe one; empty: there is one model."""
