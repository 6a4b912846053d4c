"""What decides what the decoder computes: the sizes and switches of a model, and the names of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from specray.engine.activation import Activation
from specray.engine.model.layers.experts.config import Experts
from specray.engine.model.layers.latent.config import LATENT_UP, LatentAttention
from specray.engine.model.layers.recurrent_config import DECAY_UP, GATE_UP, WIDE_WEIGHTS, RecurrentLayers


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by ``factor``, high ones as they are, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Tokens of the context before it was extended."""


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency divided by its own factor, as the ``rope_freqs`` of a GGUF file say."""

    factors: tuple[float, ...]
    """One for each frequency, the highest first."""


@dataclass(frozen=True, slots=True)
class RopeFormula:
    """Rotary frequencies by their formula."""

    theta: float
    """Base of the wavelengths."""
    scaling: LinearScaling | Llama3Scaling | FactorScaling | None = None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary frequencies as the library computed them, for the formulas that only it has."""

    inverse_frequencies: tuple[float, ...]
    """Radians per token, ``head_dim / 2`` of them; each is a float32."""
    attention_factor: float
    """Factor of cosines and sines."""


Rope = RopeFormula | RopeTable


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A model that the decoder covers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tie_word_embeddings: bool
    """The head's weight is the embedding's."""
    has_qkv_bias: bool
    has_output_bias: bool
    """The attention's output projection has a bias."""
    has_mlp_bias: bool
    has_head_norm: bool
    """Queries and keys are normed head by head."""
    windows: tuple[int | None, ...]
    """Tokens that each layer attends to; None: all."""
    rope: Rope
    """Rotary embeddings of all layers that ``own_ropes`` leaves out."""
    draft_vocab_size: int | None = None
    """Rows of a head that knows some token ids alone; None: it knows all."""
    own_ropes: tuple[tuple[int, Rope | None], ...] = ()
    """Layers whose rotary embeddings are their own; None: they have none."""
    rotary_dim: int | None = None
    """Numbers of a head that are rotated, its first ones; None: all."""
    has_neighbour_pairs: bool = False
    """Numbers that are rotated together are neighbours; else they lie half of the rotated ones apart."""
    has_whole_norm: bool = False
    """Queries and keys are normed, all heads of a row as one."""
    activation: Activation = Activation.SILU
    has_shifted_norms: bool = False
    """Weights of norms are stored less one."""
    has_sandwich_norms: bool = False
    """What attention and MLP add to the residual stream is normed before."""
    has_input_norms: bool = True
    """What attention and MLP read is normed; only with sandwich norms it need not be."""
    query_scale: float | None = None
    """Factor on the dot products; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    has_scaled_embedding: bool = False
    """The scale belongs to the embedding and is rounded to its data type; else it is of what follows."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    has_joined_queries: bool = False
    """Queries, keys and values are one weight of the checkpoint."""
    has_joined_gates: bool = False
    """Both halves of a gated pair are one weight of the checkpoint."""
    has_gated_mlps: bool = True
    """MLPs join two linear layers; else there is one, and the square of what is above zero."""
    gate_scale: float = 1.0
    """Factor of what an MLP's activation reads."""
    down_scale: float = 1.0
    """Factor of what an MLP gives."""
    attention_scale: float = 1.0
    """Factor of what attention gives."""
    experts: Experts | None = None
    has_sinks: bool = False
    """Each query head has a score that takes weight and has no value."""
    has_output_gate: bool = False
    """Behind each head's rows of the query weight are as many that gate what the head attends to."""
    latent: LatentAttention | None = None
    """Sizes of latent attention, in each layer that attends; None: keys and values are stored."""
    has_head_gates: bool = False
    """What each head attends to is multiplied by the sigmoid of a product of its own."""
    recurrent: RecurrentLayers | None = None
    """Layers that keep a state; None: there are none."""
    attending: tuple[bool, ...] | None = None
    """Which layers attend; None: those without a state."""
    with_mlps: tuple[bool, ...] | None = None
    """Which layers have an MLP or experts; None: all. A layer with nothing else has one norm."""

    @property
    def moe_intermediate_size(self) -> int | None:
        """Width of each expert's MLP; None: there are no experts."""
        return None if self.experts is None else self.experts.intermediate_size

    @property
    def shared_intermediate_size(self) -> int | None:
        """Width of the MLP beside the experts; None: there is none."""
        shared = None if self.experts is None else self.experts.shared
        return None if shared is None else shared.intermediate_size

    def wide_weights(self) -> frozenset[str]:
        """Names of weights that stay in float32 where the files have them so."""
        kinds: list[tuple[tuple[bool, ...], tuple[str, ...]]] = []
        if self.experts is not None:
            kinds.append((self.experts.layers, self.experts.wide_weights()))
        if self.recurrent is not None:
            names = tuple(f"{self.recurrent.prefix}{name}" for name in WIDE_WEIGHTS)
            kinds.append((self.recurrent.layers, names))
        return frozenset(
            f"{layer_prefix(layer)}{name}"
            for layers, names in kinds
            for layer, has_them in enumerate(layers)
            if has_them
            for name in names
        )

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Rotary embeddings of each layer; None: it has none."""
        own = dict(self.own_ropes)
        return tuple(own.get(layer, self.rope) for layer in range(self.num_hidden_layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that attend, each of which keeps keys and values."""
        recurs = (False,) * self.num_hidden_layers if self.recurrent is None else self.recurrent.layers
        attends = self.attending or tuple(not each for each in recurs)
        return tuple(layer for layer, each in enumerate(attends) if each)

    @property
    def num_attended(self) -> int:
        """Numbers that all heads of a row attend to, which the output projection takes."""
        size = self.head_dim if self.latent is None else self.latent.value_dim
        return self.num_attention_heads * size

    @staticmethod
    def is_decoded(name: str) -> bool:
        """Whether a weight is held in the model's data type, whatever the file or a format says."""
        return name.endswith(tuple(f"{each}.weight" for each in (LATENT_UP, GATE_UP, DECAY_UP)))

    @property
    def num_logits(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model by its name in a checkpoint; a tied head has none."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            for name, shape in self._layer_shapes(layer).items():
                shapes[f"{layer_prefix(layer)}{name}"] = shape
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.num_logits, self.hidden_size)
        return shapes

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        attends = layer in self.attention_layers
        if self.recurrent is not None and self.recurrent.layers[layer]:
            shapes |= self.recurrent.weight_shapes(self.hidden_size)
        attention = self._attention() if attends and self.latent is None else {}
        if attends and self.latent is not None:
            shapes |= self.latent.weight_shapes(
                self.hidden_size,
                self.num_attention_heads,
                self.head_dim,
                has_bias=self.has_qkv_bias,
                has_output_bias=self.has_output_bias,
            )
        for name, (rows, columns, has_bias) in {**attention, **self._mlp(layer)}.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.has_head_norm and attends:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        if self.has_whole_norm and attends:
            shapes["self_attn.q_norm.weight"] = (self.num_attention_heads * self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.num_key_value_heads * self.head_dim,)
        for name in self.norm_names(layer):
            shapes[f"{name}.weight"] = (self.hidden_size,)
        if self.has_sinks and attends:
            shapes[SINKS] = (self.num_attention_heads,)
        if self.has_head_gates and attends:
            shapes["self_attn.g_proj.weight"] = (self.num_attention_heads, self.hidden_size)
        if self.experts is not None and self.experts.layers[layer]:
            shapes |= self.experts.weight_shapes(
                self.hidden_size, has_mlp_bias=self.has_mlp_bias, is_gated=self.has_gated_mlps
            )
        return shapes

    def has_mlp(self, layer: int) -> bool:
        return self.with_mlps is None or self.with_mlps[layer]

    def recurs(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.layers[layer]

    def has_sandwich(self, layer: int) -> bool:
        """Whether what a layer adds to the residual stream is normed before."""
        return self.has_sandwich_norms and (self.has_input_norms or layer in self.attention_layers)

    def norm_names(self, layer: int) -> tuple[str, ...]:
        """Norms of a layer over the hidden size."""
        mixes = self.recurs(layer) or layer in self.attention_layers
        if not (mixes and self.has_mlp(layer)):
            return (INPUT_NORM,)
        if not self.has_sandwich(layer):
            return INPUT_NORM, ATTENTION_NORM
        if not self.has_input_norms:
            return ATTENTION_NORM, MLP_OUTPUT_NORM
        return INPUT_NORM, ATTENTION_NORM, MLP_NORM, MLP_OUTPUT_NORM

    def has_routed_mlp(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP."""
        return self.experts is not None and self.experts.layers[layer] and not self.experts.is_shortcut

    def _attention(self) -> dict[str, tuple[int, int, bool]]:
        hidden, has_bias = self.hidden_size, self.has_qkv_bias
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        output = {"self_attn.o_proj": (hidden, query, self.has_output_bias)}
        if self.has_joined_queries:
            return {"self_attn.qkv_proj": (query + 2 * key, hidden, has_bias), **output}
        return {
            "self_attn.q_proj": (query * (1 + self.has_output_gate), hidden, has_bias),
            "self_attn.k_proj": (key, hidden, has_bias),
            "self_attn.v_proj": (key, hidden, has_bias),
            **output,
        }

    def _mlp(self, layer: int) -> dict[str, tuple[int, int, bool]]:
        hidden, inner, has_bias = self.hidden_size, self.intermediate_size, self.has_mlp_bias
        if self.has_routed_mlp(layer) or not self.has_mlp(layer):
            return {}
        down = {"mlp.down_proj": (hidden, inner, has_bias)}
        if not self.has_gated_mlps:
            return {"mlp.up_proj": (inner, hidden, has_bias), **down}
        if self.has_joined_gates:
            return {"mlp.gate_up_proj": (2 * inner, hidden, has_bias), **down}
        return {
            "mlp.gate_proj": (inner, hidden, has_bias),
            "mlp.up_proj": (inner, hidden, has_bias),
            **down,
        }


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MODEL_TYPES = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3_text",
        "smollm3",
        "phi3",
        "granite",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "aria_text",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hy_v3",
        "kolibri1",
        "longcat_flash",
        "mellum",
        "minicpm3",
        "minimax_m2",
        "olmoe",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "solar_open",
        "youtu",
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "nemotron_h",
        "olmo_hybrid",
    }
)
"""Types of which the decoder covers what the readers in ``families`` say."""
SINKS = "self_attn.sinks"
INPUT_NORM = "input_layernorm"
ATTENTION_NORM = "post_attention_layernorm"
"""Norm after attention; before the MLP, unless there is a norm of that name."""
MLP_NORM = "pre_feedforward_layernorm"
MLP_OUTPUT_NORM = "post_feedforward_layernorm"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."
