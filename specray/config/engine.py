"""Configuration of the target and draft engines: model, memory, device, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from specray.config.adapters import AdapterName, AdaptersConfig
from specray.config.scaling import DraftScalingConfig
from specray.config.section import Section
from specray.types import DraftKind

Dtype = Literal["bfloat16", "float32"]
WeightFormat = Literal["none", "int8", "int4"]
StoredBits = Literal["auto", "dtype"]
PrefixCache = bool | Literal["exact"]
VocabularyMode = Literal["auto", "same", "intersect", "retokenize"]

AUTO_WEIGHTS = "auto"
"""Value of ``weights`` for the bits that a file stores, where there are kernels for them."""
MTP = "mtp"
"""Value of ``target.drafter`` for the MTP layer inside of the target's checkpoint."""
EMBEDDED = "embedded"
"""Model name of the pair that ships with the package."""

REMOTE_FEATURES = "remote-features"
"""Value of ``draft.model`` for ``target.drafter`` in the draft's own process."""

MODEL_FREE_DRAFTS = (
    DraftKind.NGRAM.value,
    DraftKind.SUFFIX.value,
    DraftKind.LOOKAHEAD.value,
    DraftKind.FEATURES.value,
)
"""Names of drafts without a model of their own; write a directory of such a name with its path."""

NO_CHECKPOINTS = ("", EMBEDDED, REMOTE_FEATURES, *MODEL_FREE_DRAFTS)
"""Values of ``model`` that are no path or hub id."""


RANK_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector")
"""Ray actor options that a user may set for ranks; specray sets the others."""


class EngineConfig(Section):
    """Settings that draft and target engines share."""

    model: str = Field(
        EMBEDDED,
        description="Path or hub id of a causal LM in safetensors, or directory of one with a model.gguf, or "
        "'embedded'.",
    )
    dtype: Dtype = "bfloat16"
    weights: StoredBits = Field(
        "auto",
        description="Form of weights that a file stores quantised (GGUF, GPTQ, AWQ, compressed-tensors, fp8, "
        "MXFP4, NVFP4). auto: the file's own bits, where there are kernels for them (forward decoder), else "
        "dtype; dtype: dequantised to dtype at load.",
    )
    quantization: WeightFormat = Field(
        "none",
        description="Format of the layers' weights, made when the model is loaded, whatever the file stores; "
        "none: as weights says. Forward decoder only.",
    )
    lm_head_quantization: WeightFormat = Field("none", description="Format of the lm_head's weight.")
    quantize_embedding: bool = Field(
        False,
        description="Hold the embedding in the lm_head's format, too. Else it is as weights says.",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(
        None, ge=16, description="Maximum tokens of a sequence; default: the model's, at most 4096."
    )
    block_size: int | None = Field(
        None, ge=1, description="Tokens per cache block; default: 256 or 16 on CUDA, max_model_len on CPU."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Maximum sequences at once.")
    max_num_batched_tokens: int = Field(2048, ge=16, description="Maximum new tokens of one step.")
    cache_memory_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="GiB of the block cache, per rank. auto: on CUDA what the weights and one largest step "
        "leave, or num_gpus of it where that is below 1; on CPU 4. On CPU, if a block fills a huge page, the "
        "first GiB is allocated at start, up to a quarter of the available memory.",
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads per process; default: by cores.")
    cores: tuple[int, ...] | None = Field(
        None, min_length=1, description="CPU cores that the engine's threads may use; default: all."
    )
    forward: Literal["auto", "decoder", "hf"] = Field(
        "auto",
        description="auto: specray's own decoder where it covers the architecture, else hf, through "
        "transformers.",
    )
    attention: Literal["auto", "varlen", "triton", "gather"] = Field(
        "auto",
        description="Attention backend. On CUDA, auto takes the first that works: varlen (torch's "
        "FlashAttention over blocks of 256), triton, gather. On CPU, auto is the compiled kernel.",
    )
    cuda_graphs: bool = Field(True, description="On CUDA, capture and replay forwards of few rows.")
    prefix_cache: PrefixCache = Field(
        True,
        description="Reuse computed prefixes. exact: of prompts alone, not of outputs, so that a warm cache "
        "gives the bits of a cold one for models with recurrent layers, too.",
    )
    profile_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Seconds at start in which the engine measures its steps, so that the router's first "
        "choices are good; 0: none.",
    )
    trust_remote_code: Literal[False] = Field(False, description="Remote code is never run.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks that share each layer.")
    placement: Literal["auto", "one-node", "nodes"] = Field(
        "auto",
        description="Placement of the ranks. one-node: wait for a node with room for all; nodes: use as few "
        "nodes as possible now; auto: one-node if the cluster has a node of that size at deployment, else "
        "nodes. If nodes are started on demand, do not use auto.",
    )
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_gpus(self) -> float:
        """GPUs that each rank asks of Ray; one where the device is CUDA and nothing is said."""
        return float(self.ray_actor_options.get("num_gpus", 1.0 if self.device == "cuda" else 0.0) or 0.0)

    @property
    def shares_gpu(self) -> bool:
        """Whether each rank's GPU may be another engine's, too."""
        return 0.0 < self.num_gpus < 1.0

    @property
    def number_format(self) -> str:
        """The formats of weights and computation, as people and other processes read them."""
        parts: list[str] = [self.dtype]
        if self.weights != AUTO_WEIGHTS:
            parts.append("dequantised weights")
        if self.quantization != "none":
            parts.append(f"{self.quantization} layers")
        if self.lm_head_quantization != "none":
            parts.append(f"{self.lm_head_quantization} lm_head")
        if self.quantize_embedding:
            parts.append("and embedding")
        return " ".join(parts)

    def _check_formats(self) -> None:
        if self.quantize_embedding and self.lm_head_quantization == "none":
            raise ValueError(
                "quantize_embedding is true with lm_head_quantization 'none'; allowed: 'int8' or 'int4'"
            )
        named = "quantization" if self.quantization != "none" else "lm_head_quantization"
        value = getattr(self, named)
        if value != "none" and self.forward == "hf":
            raise ValueError(f"{named} is {value!r} with forward 'hf'; allowed with it: 'none'")
        if value != "none" and self.model in (*MODEL_FREE_DRAFTS, REMOTE_FEATURES):
            raise ValueError(f"{named} is {value!r} with model {self.model!r}; allowed with it: 'none'")

    def _check_rank_options(self) -> None:
        unknown = sorted(self.ray_actor_options.keys() - RANK_OPTIONS)
        if unknown:
            raise ValueError(
                f"ray_actor_options has {', '.join(unknown)}; allowed for ranks: {', '.join(RANK_OPTIONS)}"
            )

    @field_validator("model", "draft", check_fields=False)
    @classmethod
    def _absolute(cls, model: str | None) -> str | None:
        """``~`` and relative paths of directories, which other processes would not find as they are."""
        if model is None or model in NO_CHECKPOINTS:
            return model
        path = Path(model).expanduser() if model.startswith("~") else Path(model)
        return str(path.absolute()) if model.startswith("~") or path.is_dir() else model


class TargetConfig(EngineConfig):
    """The large model, whose distribution is authoritative."""

    drafter: str | None = Field(
        None,
        min_length=1,
        description="Directory of a drafter that reads the target's features (EAGLE, P-EAGLE, DFlash, "
        "DSpark, Medusa), or 'mtp': the MTP layer in the target's own checkpoint; it is loaded beside the "
        "target. Set, and with no draft.model, it drafts for all requests.",
    )

    drafter_vocabulary_ids: str | None = Field(
        None,
        description="File with the token ids that 'mtp' may propose: a JSON list, .npy or .safetensors; it "
        "drafts through these rows of the target's head; default: all.",
    )
    drafter_head_quantization: WeightFormat = Field(
        "none",
        description="Format of a copy of the target's head through which 'mtp' drafts; none: the head.",
    )

    adapter: str | None = Field(
        None,
        min_length=1,
        description="Directory of a LoRA adapter (adapter_config.json, adapter_model.safetensors), which is "
        "merged into the target's weights when they are loaded.",
    )

    adapters: AdaptersConfig | None = Field(
        None, description="LoRA adapters that requests name, loaded while serving; default: none."
    )

    snapshot_memory_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="GiB of cache_memory_gib, per rank, for snapshots of recurrent layers' states, by which "
        "prefixes are reused; 0: none are. auto: a quarter, as far as one sequence has room beside it.",
    )
    deterministic: Literal["off", "on"] = Field(
        "off",
        description="on: an output's bits depend neither on other requests nor on speculation. A target for "
        "which that cannot hold is refused, and a lost Router's output continues on processors of the same "
        "instruction set only; on CUDA steps take longer. The decoder on CPU has this property either way.",
    )
    ray_actor_options: dict[str, Any] = Field(
        default_factory=dict, description=f"Ray options of each rank: {', '.join(RANK_OPTIONS)}."
    )

    @field_validator("deterministic", mode="before")
    @classmethod
    def _as_word(cls, value: Any) -> Any:
        """YAML reads on and off as truth values."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @field_validator("drafter_vocabulary_ids")
    @classmethod
    def _absolute_file(cls, file: str | None) -> str | None:
        return None if file is None else str(Path(file).expanduser().absolute())

    @field_validator("drafter", "adapter")
    @classmethod
    def _absolute_directory(cls, path: str | None) -> str | None:
        """``~`` and relative paths, which other processes would not find as they are."""
        return path if path is None or path == MTP else str(Path(path).expanduser().absolute())

    @model_validator(mode="after")
    def _check_options(self) -> TargetConfig:
        for name, plain in (("drafter_vocabulary_ids", None), ("drafter_head_quantization", "none")):
            if (value := getattr(self, name)) != plain and self.drafter != MTP:
                raise ValueError(f"{name} is {value!r} with drafter {self.drafter!r}; allowed with: {MTP!r}")
        self._check_formats()
        self._check_rank_options()
        return self


class DraftConfig(EngineConfig):
    """The small model that proposes."""

    model: str = Field(
        EMBEDDED,
        description="As for the target; or 'ngram' or 'suffix', which draft in the Router without a model, "
        "or 'lookahead' or 'features' (target.drafter), which draft in the target; or 'remote-features': "
        "target.drafter in the draft's own process.",
    )
    enabled: bool = Field(True, description="False: plain decoding.")
    vocabulary_ids: str | None = Field(
        None,
        description="File with the token ids that the draft may propose: a JSON list, .npy or .safetensors. "
        "The head is cut to them when it is loaded; default: all that it has.",
    )
    draft: str | None = Field(
        None,
        description="Draft of the draft, which makes its proposals sooner and changes none: 'ngram', or path "
        "or hub id of a smaller model with the same tokenizer.",
    )
    inner_draft_tokens: int = Field(
        4, ge=1, le=16, description="Maximum tokens of its own draft that the draft verifies in one forward."
    )
    vocabulary: VocabularyMode = Field(
        "auto",
        description="How a draft with another tokenizer is used. same: it is refused. intersect: it proposes "
        "tokens that both have. retokenize: it proposes text, which the target's tokenizer reads. auto: "
        "intersect, or retokenize where less than half of the draft's probability is on tokens of both.",
    )
    window: int | None = Field(
        None,
        ge=16,
        le=1 << 20,
        description="Last tokens that the draft sees at least, beside the first four; default: all.",
    )
    adapters: dict[AdapterName, str] = Field(
        default_factory=dict,
        description="Directories of the draft's own LoRA adapters, by the names of the target's that they "
        "draft for; others are drafted for without.",
    )
    num_replicas: int = Field(1, ge=0, le=1024, description="0: plain decoding.")
    autoscaling: DraftScalingConfig | None = Field(
        None, description="Number of replicas by their utilisation, in place of num_replicas."
    )
    ray_actor_options: dict[str, Any] = Field(
        default_factory=dict,
        description=f"Ray options of each rank: any of a single rank, else {', '.join(RANK_OPTIONS)}.",
    )

    @field_validator("vocabulary_ids")
    @classmethod
    def _absolute_file(cls, file: str | None) -> str | None:
        """``~`` and relative paths, which other processes would not find as they are."""
        return None if file is None else str(Path(file).expanduser().absolute())

    @field_validator("adapters")
    @classmethod
    def _absolute_directories(cls, adapters: dict[str, str]) -> dict[str, str]:
        """``~`` and relative paths, as those of files."""
        return {name: str(Path(path).expanduser().absolute()) for name, path in adapters.items()}

    @model_validator(mode="after")
    def _check_options(self) -> DraftConfig:
        self._check_formats()
        if self.adapters and self.model in MODEL_FREE_DRAFTS:
            raise ValueError(
                f"draft.adapters is {self.adapters!r} with model {self.model!r}; allowed: with a model"
            )
        if self.tensor_parallel_size > 1:
            self._check_rank_options()
        if self.draft in set(NO_CHECKPOINTS) - {DraftKind.NGRAM.value}:
            raise ValueError(
                f"draft.draft is {self.draft!r}; allowed: 'ngram', path or hub id of a model, or none"
            )
        if self.draft is not None and self.model in MODEL_FREE_DRAFTS:
            raise ValueError(
                f"draft.draft is {self.draft!r} with model {self.model!r}; allowed: with a model"
            )
        self._check_features()
        return self

    def _check_features(self) -> None:
        """Raises ValueError for options that a remote feature drafter lacks."""
        if self.model != REMOTE_FEATURES:
            return
        for name, plain in (
            ("draft", None),
            ("window", None),
            ("adapters", {}),
            ("vocabulary_ids", None),
            ("tensor_parallel_size", 1),
            ("forward", "auto"),
        ):
            if (value := getattr(self, name)) != plain:
                raise ValueError(
                    f"{name} is {value!r} with model {REMOTE_FEATURES!r}; allowed with it: "
                    f"{repr(plain) if plain else 'none'}"
                )

    @property
    def reads_features(self) -> bool:
        """Whether the draft runs the target's drafter, which reads features that the target sends."""
        return self.enabled and self.model == REMOTE_FEATURES

    @property
    def inner_model(self) -> DraftConfig | None:
        """The configuration of the model that drafts for the draft; None: there is none."""
        if not self.has_model or self.draft in (None, DraftKind.NGRAM.value):
            return None
        own: dict[str, Any] = {
            "model": self.draft,
            "draft": None,
            "vocabulary_ids": None,
            "adapters": {},
            "tensor_parallel_size": 1,
            "profile_s": 0.0,
        }
        if self.cache_memory_gib == "auto":
            # GiB of the block cache of a model that drafts for the draft, where nothing is said.
            own["cache_memory_gib"] = 1.0
        return self.model_copy(update=own)

    @property
    def has_replicas(self) -> bool:
        """Whether there is a draft deployment, which may have no replicas at times."""
        return self.has_model and (self.autoscaling is not None or self.num_replicas > 0)

    @property
    def most_replicas(self) -> int:
        """Maximum replicas of the draft deployment."""
        if not self.has_model:
            return 0
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def scales_to_none(self) -> bool:
        """Whether the deployment may scale down to no replicas."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def kind_in_use(self) -> DraftKind:
        """Draft kind of requests that name none; MODEL also if there is no draft."""
        is_model_free = self.enabled and self.model in MODEL_FREE_DRAFTS
        return DraftKind(self.model) if is_model_free else DraftKind.MODEL

    @property
    def has_model(self) -> bool:
        return self.enabled and self.model not in MODEL_FREE_DRAFTS
