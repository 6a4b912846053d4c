"""The profile of a pair: one JSON file that `specray profile` measures and `specray plan` simulates from.

All times are in seconds. An engine's times are those it reports of its steps; transport and the router's own
work are separate, so that engines of several profiles can be combined.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specray.control.experts import ExpertUse
from specray.engine_info import PROTOCOL_VERSION, EngineInfo, RoutedExperts, StepTime
from specray.errors import ConfigError

SCHEMA_VERSION: Final = 2
INFO_FIELDS: Final = (
    "model",
    "vocab_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "num_snapshots",
    "dtype",
    "context_token_s",
)
"""What an engine says of itself, and its profile has under the same name."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class LinearTime(_Part):
    """A time that grows with the number of items: ``fixed_s + per_item_s * items``."""

    fixed_s: float = Field(0.0, ge=0)
    per_item_s: float = Field(0.0, ge=0)

    def of(self, num_items: int) -> float:
        return self.fixed_s + self.per_item_s * num_items


class VerifyPoint(_Part):
    """Time of a target step with running sequences, without the time per sequence.

    Of a mixture, the time that it would take if all rows hit the experts of one.
    """

    num_rows: float = Field(ge=1, description="Draft tokens and the one before them, of all sequences.")
    seconds: float = Field(gt=0)


class ProposePoint(_Part):
    """Time of a draft step that answered proposals."""

    num_sequences: float = Field(ge=1)
    num_tokens: int = Field(ge=1, description="Draft tokens per proposal.")
    seconds: float = Field(gt=0)


class OutcomesPoint(_Part):
    """Time of a draft step that answered outcomes."""

    num_branches: float = Field(ge=1, description="Branches of all sequences together.")
    num_tokens: int = Field(ge=1, description="Draft tokens per branch.")
    seconds: float = Field(gt=0)


class PrefillPoint(_Part):
    """Time of a step that computed the first tokens of a prompt and nothing else."""

    num_tokens: int = Field(ge=1)
    seconds: float = Field(gt=0)


class ContextPoint(_Part):
    """Additional time of a step for each sequence with this many tokens before its rows."""

    num_tokens: float = Field(ge=0)
    rows_per_sequence: int = Field(1, ge=1, description="Rows per sequence that attend to these tokens.")
    seconds: float = Field(ge=0)


class StepTimePoint(_Part):
    """A step time that the engine reported at its start, on which the router's first decisions rest."""

    num_rows: int = Field(ge=1)
    seconds: float = Field(gt=0)
    num_experts: int = Field(0, ge=0, description="Distinct experts that it hit in all layers.")


class EngineProfile(_Part):
    """Times that both engines have."""

    model: str
    hardware: str = Field(min_length=1, description="Name of one device, to which --cost refers.")
    num_devices: int = Field(1, ge=1, description="Devices of one engine: its tensor-parallel size.")
    vocab_size: int = Field(ge=1)
    max_model_len: int = Field(ge=16)
    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    block_size: int = Field(ge=1)
    num_blocks: int = Field(ge=0, description="Blocks of the KV cache; 0: unknown, and not limited.")
    num_snapshots: int = Field(0, ge=0, description="Room for snapshots of recurrent layers' states.")
    dtype: str = ""
    step_times: tuple[StepTimePoint, ...] = ()
    context_token_s: float = Field(
        0.0,
        ge=0,
        description="Seconds of a target step per token that its sequences hold; not included in step_times.",
    )
    prefill: tuple[PrefillPoint, ...] = Field(min_length=1)
    context: tuple[ContextPoint, ...] = Field(
        (), description="Additional step times by context; 0 at the contexts with which steps were measured."
    )
    transport: LinearTime = Field(
        default_factory=LinearTime, description="Round trip and the worker's own work, by number of items."
    )
    step_spread: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="Quantiles of single steps, as multiples of their average. None: all equal."
    )
    transport_spread: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="Quantiles of single transports, as multiples of their average. None: all equal."
    )

    def info(self, role: str) -> EngineInfo:
        """Returns the info of a simulated engine of this kind."""
        return EngineInfo(
            role=role,
            tokenizer_fingerprint="simulated",
            protocol_version=PROTOCOL_VERSION,
            tensor_parallel_size=self.num_devices,
            step_times=tuple(StepTime(**dict(point)) for point in self.step_times),
            **{name: getattr(self, name) for name in INFO_FIELDS},
        )


class ExpertsProfile(_Part):
    """Experts of a target that is a mixture, those of all layers together, and which of them rows hit."""

    num_experts: int = Field(ge=2)
    num_chosen: int = Field(ge=1, description="Experts that compute a row; fewer than there are.")
    share: float = Field(ge=0, lt=1, description="Share of the experts in the time of a step of one row.")
    sequences_exponent: float = Field(
        1.0, gt=0, le=1, description="q sequences hit as many experts as q to this power that chose apart."
    )
    rows_exponent: float = Field(
        1.0, gt=0, le=1, description="r rows of a sequence hit as many as r to this power that chose apart."
    )

    @model_validator(mode="after")
    def _check_chosen(self) -> ExpertsProfile:
        if self.num_chosen >= self.num_experts:
            raise ValueError(
                f"num_chosen is {self.num_chosen}; allowed: 1..{self.num_experts - 1}, fewer than num_experts"
            )
        return self

    def use(self) -> ExpertUse:
        """What a router would know of them after long."""
        info = RoutedExperts(self.num_experts, self.num_chosen, self.share)
        return ExpertUse(info, self.sequences_exponent, self.rows_exponent)


class TargetProfile(EngineProfile):
    """Times of one target group."""

    experts: ExpertsProfile | None = None
    verify: tuple[VerifyPoint, ...] = Field(min_length=1)
    per_sequence_s: float = Field(0.0, ge=0, description="Seconds of a step per sequence.")
    slowdown_beside_draft: float = Field(
        1.0,
        ge=1,
        description="Slowdown of a step while the draft works; 1: they share nothing.",
    )
    prompt_slowdown_beside_draft: float = Field(
        1.0, ge=1, description="Slowdown of a step with prompts while the draft works."
    )
    prompt_wait_s: float = Field(
        0.0,
        ge=0,
        description="Seconds of a step with a prompt beyond its forward and transport: in router, worker and "
        "between.",
    )
    plain_transport: LinearTime | None = Field(
        None, description="Transport of steps without draft tokens; default: as transport."
    )

    def info(self, role: str) -> EngineInfo:
        """See EngineProfile."""
        return replace(super().info(role), experts=None if self.experts is None else self.experts.use().info)


class DraftProfile(EngineProfile):
    """Times of one draft."""

    propose: tuple[ProposePoint, ...] = Field(min_length=1)
    outcomes: tuple[OutcomesPoint, ...] = ()
    slowdown_beside_target: float = Field(
        1.0, ge=1, description="Slowdown of a step while the target works; 1: they share nothing."
    )


class RouterProfile(_Part):
    """The router's own time between an answer and the next question, by sessions of the step."""

    verify_after_verdict: LinearTime = Field(default_factory=LinearTime)
    verify_after_proposal: LinearTime = Field(default_factory=LinearTime)
    ask_after_verdict: LinearTime = Field(default_factory=LinearTime)


Agreements = Annotated[str, Field(pattern=r"^[01]+$")]
LENGTH_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvw"
"""Digits for lengths up to 32, the longest proposal."""


class ProposalLengths(_Part):
    """Lengths of the draft's proposals under one bound."""

    min_acceptance: float = Field(gt=0, lt=1, description="Bound of acceptance, as the router sends it.")
    by_position: str = Field(
        pattern=r"^[1-9a-w]+$",
        description="Length of the proposal that begins at each place of the output, as a digit (a: 10).",
    )


class MeasuredOutput(_Part):
    """An output of the target, and what the draft would have proposed at each place of it.

    Tokens are numbered from 1 in the order in which they first appear in prompt and output: only their
    equality counts.
    """

    prompt: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    agreements: Agreements = Field(
        description="Digit 1 where the draft's token is the output's, else 0, by place."
    )
    lengths: tuple[ProposalLengths, ...] = Field(
        (), description="Proposal lengths by increasing bound; empty: the draft ends no proposal early."
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> MeasuredOutput:
        for name, text in (
            ("agreements", self.agreements),
            *((f"lengths at {one.min_acceptance:g}", one.by_position) for one in self.lengths),
        ):
            if len(text) != len(self.tokens):
                raise ValueError(f"{name} are {len(text)} characters for {len(self.tokens)} tokens")
        return self


class HitRate(_Part):
    """Hit rate of enumerated outcomes."""

    width: int = Field(ge=1, le=3, description="Branches for each number of accepted tokens, on average.")
    rate: float = Field(ge=0, le=1)
    num_lookups: int = Field(ge=1)


class AcceptanceProfile(_Part):
    """Quality of the draft at one temperature."""

    temperature: float = Field(ge=0, le=2)
    by_position: tuple[float, ...] = Field(
        min_length=1,
        description="Entry i: share of the rounds that kept draft token i, among those that came so far.",
    )
    num_rounds: int = Field(ge=1)
    outputs: tuple[MeasuredOutput, ...] = Field(
        (),
        description="Outputs, of which a simulated request has one; without any, by_position is drawn from, "
        "without an n-gram fallback.",
    )
    hit_rates: tuple[HitRate, ...] = ()

    @model_validator(mode="after")
    def _check_rates(self) -> AcceptanceProfile:
        for position, rate in enumerate(self.by_position):
            if not 0 <= rate <= 1:
                raise ValueError(f"by_position[{position}] is {rate}; allowed: 0..1")
        return self


class Profile(_Part):
    """A measured pair."""

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str = Field("", description="Name for tables; default: the hardware.")
    created: str = ""
    specray_version: str = ""
    dataset: str = ""
    target: TargetProfile
    draft: DraftProfile | None = None
    router: RouterProfile = Field(default_factory=RouterProfile)
    acceptance: tuple[AcceptanceProfile, ...] = ()

    @model_validator(mode="after")
    def _check_pair(self) -> Profile:
        if self.draft is not None and not self.acceptance:
            raise ValueError("acceptance is empty; allowed: at least one temperature where there is a draft")
        if self.draft is not None and self.draft.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"draft.vocab_size is {self.draft.vocab_size}, target.vocab_size {self.target.vocab_size};"
                " they must be equal"
            )
        return self

    def acceptance_at(self, temperature: float) -> AcceptanceProfile | None:
        """Returns the acceptance at the nearest measured temperature; None without a draft."""
        return min(self.acceptance, key=lambda one: abs(one.temperature - temperature), default=None)


def save_profile(profile: Profile, path: Path) -> None:
    """Writes the file. Raises ConfigError."""
    try:
        path.write_text(json.dumps(profile.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


def load_profile(path: Path) -> Profile:
    """Reads and checks a file.

    Raises:
        ConfigError: it is missing, or names every wrong field, its value and what is allowed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--profile {path} is not JSON; `specray profile` writes such a file") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"--profile {path}: schema_version is {version!r}; allowed: {SCHEMA_VERSION} (measure it again)"
        )
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, problem['loc'])) or 'profile'}: {problem['msg']}"
            + (f" (got {problem['input']!r})" if problem["loc"] and problem["type"] != "missing" else "")
            for problem in error.errors()
        ]
        raise ConfigError(f"--profile {path}: {'; '.join(lines)}") from None
