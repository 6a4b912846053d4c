"""Which weights of a model are quantised, what of it cannot be, and the bytes that all weights take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specray.config import AUTO_WEIGHTS, EngineConfig
from specray.engine.model.decoder_config import EMBEDDING, HEAD, DecoderConfig
from specray.engine.weights.quantization import GROUP, Quantization
from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a model's weights; what is not named here stays in the model's data type."""

    layers: Quantization = Quantization.NONE
    """Format of the linear layers between the embedding and the head."""
    head: Quantization = Quantization.NONE
    has_quantized_embedding: bool = False
    """True if look-ups read the head's format, too."""
    has_own_bits: bool = True
    """What is not quantised here stays in the bits that a file stores, where there are kernels for them."""

    @classmethod
    def of(cls, config: EngineConfig) -> WeightFormats:
        layers, head = Quantization(config.quantization), Quantization(config.lm_head_quantization)
        return cls(layers, head, config.quantize_embedding, config.weights == AUTO_WEIGHTS)

    @property
    def is_plain(self) -> bool:
        return self.layers is Quantization.NONE and self.head is Quantization.NONE

    def setting(self) -> str:
        """The setting that asks for quantised weights, and its value, as messages name it."""
        if self.layers is not Quantization.NONE:
            return f"quantization is {self.layers.value!r}"
        return f"lm_head_quantization is {self.head.value!r}"

    def check(self, path: str, decoder: DecoderConfig | None, world_size: int) -> None:
        """Raises ConfigError where a model's weights cannot be held in these formats.

        Args:
            decoder: None: forward hf runs the model.
            world_size: ranks, each with an equal part of the layers' input features.
        """
        if self.is_plain:
            return
        if decoder is None:
            raise ConfigError(f"{self.setting()}; forward hf, which runs model {path!r}, allows only 'none'")
        inputs: dict[str, int] = {}
        if self.layers is not Quantization.NONE:
            inputs["hidden_size"] = decoder.hidden_size
            if decoder.latent is None:
                inputs["num_attention_heads * head_dim"] = decoder.num_attended // world_size
            else:
                inputs["num_attention_heads * v_head_dim"] = decoder.num_attended // world_size
                inputs["q_lora_rank"] = decoder.latent.query_rank or decoder.hidden_size
            inputs["intermediate_size"] = decoder.intermediate_size // world_size
            for name in ("moe_intermediate_size", "shared_intermediate_size"):
                if (size := getattr(decoder, name)) is not None:
                    inputs[name] = size // world_size
        if self.head is not Quantization.NONE:
            inputs["hidden_size"] = decoder.hidden_size
        for name, size in inputs.items():
            if size % GROUP:
                raise ConfigError(
                    f"{self.setting()}; model {path!r} has {size} input features on a rank ({name}), which "
                    f"must be a multiple of {GROUP}; allowed: 'none'"
                )

    def num_bytes(
        self, decoder: DecoderConfig, item_size: int, stored: Mapping[str, int] = MappingProxyType({})
    ) -> int:
        """Bytes of all weights, those of other ranks included.

        Args:
            item_size: bytes of a number in the model's data type.
            stored: bytes of each weight that stays in a file's own bits, unless it is quantised here.
        """
        plain, total = 8.0 * item_size, 0.0
        shapes = decoder.weight_shapes()
        for name, shape in shapes.items():
            is_matrix = len(shape) > 1 and not name.endswith("bias")
            format = self.of_matrix(name) if is_matrix else Quantization.NONE
            if format is Quantization.NONE and name in stored:
                total += stored[name]
            else:
                total += math.prod(shape) * self._bits(format, plain) / 8
        if decoder.tie_word_embeddings and self.head is not Quantization.NONE:
            # The quantised head is a copy, unless look-ups share it, which they do as it is.
            is_copy = not self.has_quantized_embedding or decoder.embedding_scale != 1.0
            total += is_copy * math.prod(shapes[EMBEDDING]) * self._bits(self.head, plain) / 8
        return int(total)

    def of_matrix(self, name: str) -> Quantization:
        """Format that a weight of two dimensions is quantised to here."""
        if DecoderConfig.is_decoded(name):
            return Quantization.NONE
        if name == EMBEDDING:
            return self.head if self.has_quantized_embedding else Quantization.NONE
        return self.head if name == HEAD else self.layers

    @staticmethod
    def _bits(format: Quantization, plain: float) -> float:
        return plain if format is Quantization.NONE else format.bits_per_weight


PLAIN = WeightFormats()
"""Every weight in the model's data type."""
