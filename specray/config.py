"""The configuration: one YAML file, for the command line, ``serve deploy`` and the helm chart alike.

Unknown keys are refused. Everything has a default except what the user must decide; with an empty file the
embedded pair is served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from specray.errors import ConfigError
from specray.sections import (
    AuthConfig,
    DraftScalingConfig,
    GrpcConfig,
    HttpConfig,
    IngressConfig,
    LoggingConfig,
    RouterScalingConfig,
    RpcConfig,
    Section,
    TelemetryConfig,
)
from specray.types import DraftKind, Overlap, Verification

Dtype = Literal["bfloat16", "float32"]
EMBEDDED = "embedded"
"""The model name that stands for the pair that ships with the package."""
MODEL_FREE_DRAFTS = (DraftKind.NGRAM.value, DraftKind.SUFFIX.value)
"""Names of drafts that are no models; a directory of that name is written with its path."""
RANK_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector")
"""What a rank of a group may ask of Ray; the rest is ours to say."""


class EngineConfig(Section):
    """What draft and target engines have in common."""

    model: str = Field(EMBEDDED, description="Path or hub id of a causal LM in safetensors, or 'embedded'.")
    dtype: Dtype = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(
        None, ge=16, description="Most tokens of one sequence; default: what the model allows, at most 4096."
    )
    block_size: int | None = Field(
        None, ge=1, description="Tokens per cache block; default: 256 or 16 on CUDA, max_model_len on CPU."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most sequences held at once.")
    max_num_batched_tokens: int = Field(2048, ge=16, description="Most new tokens of one step.")
    cache_memory_gib: float = Field(
        4.0,
        gt=0,
        description="Memory for the block cache, per rank. On CPU, where a sequence may fill a large page, "
        "it is taken at start, but for what exceeds a quarter of the memory at hand.",
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads per process; default: by cores.")
    cores: tuple[int, ...] | None = Field(
        None, min_length=1, description="CPU cores that the engine's threads may use; default: all there are."
    )
    forward: Literal["auto", "lowered", "generic"] = Field(
        "auto", description="auto: lowered where the architecture allows it, else generic."
    )
    attention: Literal["auto", "varlen", "triton", "gather"] = Field(
        "auto",
        description="On CUDA, auto takes the first that works: varlen (torch's FlashAttention over blocks of "
        "256), triton, gather. On CPU, auto is the compiled kernel.",
    )
    cuda_graphs: bool = Field(True, description="On CUDA, forwards of few rows are captured and replayed.")
    prefix_cache: bool = Field(True, description="Computed prefixes of prompts are used again.")
    profile_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Seconds at the start in which the engine measures its steps, so that the router's first "
        "choices are good ones; 0: none.",
    )
    trust_remote_code: Literal[False] = Field(False, description="Remote code is never run.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks that share each layer.")
    placement: Literal["auto", "one-node", "nodes"] = Field(
        "auto",
        description="Of the ranks. one-node: they wait for a node with room for all; nodes: they take as few "
        "nodes as have room now; auto: one-node where the cluster has a node of that size at the time of "
        "deployment, else nodes. Where nodes are started on demand, say which.",
    )
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)

    def _check_rank_options(self) -> None:
        unknown = sorted(self.ray_actor_options.keys() - RANK_OPTIONS)
        if unknown:
            raise ValueError(
                f"ray_actor_options has {', '.join(unknown)}; allowed for ranks: {', '.join(RANK_OPTIONS)}"
            )


class TargetConfig(EngineConfig):
    """The large model, whose distribution is authoritative."""

    ray_actor_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Of each rank: {', '.join(RANK_OPTIONS)}."
    )

    @model_validator(mode="after")
    def _check_options(self) -> TargetConfig:
        self._check_rank_options()
        return self

    @property
    def checkpoint(self) -> str:
        """Names what an output depends on, as far as a configuration says: not what lies in the files."""
        return f"{self.model} in {self.dtype}"


class DraftConfig(EngineConfig):
    """The small model that proposes."""

    model: str = Field(
        EMBEDDED,
        description="As for the target; or 'ngram' or 'suffix', which draft in the Router and need no model.",
    )
    enabled: bool = Field(True, description="False: plain decoding.")
    num_replicas: int = Field(1, ge=0, le=1024, description="0: plain decoding.")
    autoscaling: DraftScalingConfig | None = Field(
        None, description="In place of num_replicas: as many drafts as their utilisation asks for."
    )
    ray_actor_options: dict[str, Any] = Field(
        default_factory=dict,
        description=f"Of each rank. Of several only {', '.join(RANK_OPTIONS)}; one may have any of Ray's.",
    )

    @model_validator(mode="after")
    def _check_options(self) -> DraftConfig:
        if self.tensor_parallel_size > 1:
            self._check_rank_options()
        return self

    @property
    def has_replicas(self) -> bool:
        """There is a draft deployment; it may have no replica at times."""
        return self.has_model and (self.autoscaling is not None or self.num_replicas > 0)

    @property
    def most_replicas(self) -> int:
        """Of the draft deployment at once."""
        if not self.has_model:
            return 0
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def scales_to_none(self) -> bool:
        """Replicas come only when they are asked for."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def kind_in_use(self) -> DraftKind:
        """What drafts for requests that do not say; MODEL also where there is no draft."""
        is_model_free = self.enabled and self.model in MODEL_FREE_DRAFTS
        return DraftKind(self.model) if is_model_free else DraftKind.MODEL

    @property
    def has_model(self) -> bool:
        """There is a draft model to load and to lease."""
        return self.enabled and self.model not in MODEL_FREE_DRAFTS


class SpeculationConfig(Section):
    """How the pair works together."""

    num_speculative_tokens: int | Literal["auto"] = Field(
        "auto", description="K: most draft tokens per round, 0..32; auto: chosen by measurement."
    )
    verification: Verification = Verification.COUPLED
    # Measured on 2 cores that both engines share, tokens/s: a 193M target 164 serial, 168 auto; the embedded
    # pair 876 and 829. Where the draft is behind a network, overlap hides the way: choose auto.
    overlap: Overlap | Literal["auto"] = Overlap.SERIAL
    filler: Literal["none", "ngram", "suffix"] = Field(
        "ngram",
        description="What is verified where the draft model has nothing to offer, while its acceptance pays.",
    )
    past_output_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Tokens of past outputs kept per tenant, for suffix drafts of its requests; 0: none.",
    )
    max_num_draft_probs: int = Field(
        64, ge=1, le=256, description="Support of the sparse draft distribution under rejection."
    )

    @model_validator(mode="after")
    def _check_k(self) -> SpeculationConfig:
        k = self.num_speculative_tokens
        if k != "auto" and not 0 <= k <= 32:
            raise ValueError(f"num_speculative_tokens is {k}; allowed: 0..32 or auto")
        return self


class RouterConfig(Section):
    """Queues, budgets and deadlines."""

    num_replicas: int = Field(1, ge=1, le=1024, description="Each with a target of its own.")
    autoscaling: RouterScalingConfig | None = Field(
        None, description="In place of num_replicas: as many as the waiting prompt tokens ask for."
    )
    max_queued_requests: int = Field(256, ge=0, description="Waiting requests; more are refused (429).")
    max_queued_tokens: int = Field(262_144, ge=1, description="Prompt tokens of waiting requests.")
    prefill_chunk_tokens: int = Field(512, ge=16, description="Most prompt tokens of one Verify.")
    max_prefill_slowdown: float = Field(
        3.0,
        ge=1,
        description="A step that running sessions share with prompts takes at most so many times as long as "
        "without. But 16 prompt tokens always go along, and whole pieces while a quarter of all wait.",
    )
    round_timeout_s: float = Field(5.0, gt=0, description="A draft that is silent for so long is lost.")
    verify_timeout_s: float = Field(
        60.0, gt=0, description="A target that is silent for so long is lost: its ranks are started anew."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="From arrival to the last token.")
    stream_interval_ms: float = Field(20.0, ge=0, description="At most one chunk of a stream per interval.")
    start_timeout_s: float = Field(600.0, gt=0, description="For loading models and connecting workers.")
    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        description="What ends finishes its requests for so long: a Router, whose others go to the next one, "
        "and an Ingress, whose others have to be sent again.",
    )
    trace_events: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Decisions and messages kept for /debug/trace and `specray bench trace`, about five a "
        "round and request; 0: none.",
    )


class Config(Section):
    """The whole service."""

    served_model_name: str | None = Field(
        None, min_length=1, description="Name in the API; default: the target's directory or hub name."
    )
    target: TargetConfig = Field(default_factory=TargetConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @property
    def model_name(self) -> str:
        """The name that clients send as ``model``."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "specray-embedded" if self.target.model == EMBEDDED else Path(self.target.model).name


def parse_config(values: dict[str, Any]) -> Config:
    """Validates a configuration given as nested dictionaries.

    Raises:
        ConfigError: names every wrong key, its value and what is allowed.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, problem['loc'])) or 'configuration'}: {problem['msg']}"
            + _shown_input(problem["type"], problem["loc"], problem["input"])
            for problem in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from None


def _shown_input(kind: str, location: tuple[int | str, ...], value: object) -> str:
    # Where a hash belongs somebody may have put the key itself; it must not get into a log.
    is_secret = location[:1] == ("auth",) and (
        isinstance(value, (dict, list))
        or location[-1] in ("auth", "keys", "sha256")
        or location[-2:-1] == ("keys",)
    )
    return "" if kind == "extra_forbidden" or is_secret else f" (got {value!r})"


def load_config(path: str | Path) -> Config:
    """Reads and validates a YAML file. Raises ConfigError for a missing or wrong file."""
    return parse_config(read_config_file(path))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The file's nested dictionaries, not yet validated, so that options can be merged over them.

    Raises:
        ConfigError: the file is missing or is not a YAML mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} must hold a mapping, not a {type(values).__name__}")
    return values
