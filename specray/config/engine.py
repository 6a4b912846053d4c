"""Target and draft engines: model, memory, device, ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from specray.config.scaling import DraftScalingConfig
from specray.config.section import Section
from specray.types import DraftKind

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
    forward: Literal["auto", "decoder", "hf"] = Field(
        "auto",
        description="auto: specray's own decoder where it covers the architecture, else hf, through "
        "transformers.",
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
