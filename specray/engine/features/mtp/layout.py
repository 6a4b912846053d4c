"""Reads the MTP layers of a target's checkpoint, whichever family's names they have.

Such a layer is one of the target's own kind that attends, after a projection of an embedding and a hidden
state. It is read as a layer of the decoder, from the files that the target's layers come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

import torch

from specray.config import MTP
from specray.engine.features.base import TargetShape
from specray.engine.features.layout import DrafterLayout
from specray.engine.model.checkpoint.gguf_weights import PREDICTORS
from specray.engine.model.checkpoint.names import as_stored, decoder_names
from specray.engine.model.checkpoint.source import NamedWeights
from specray.engine.model.checks.weights import COMPUTED, check_weight, listed
from specray.engine.model.decoder_config import EMBEDDING, HEAD, DecoderConfig, layer_prefix
from specray.engine.model.description import ModelArgs, ModelDescription, describe
from specray.engine.model.loader import open_weights
from specray.engine.model.lowering import head_shape
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import has_own_kernels
from specray.engine.step import CacheShape
from specray.errors import ConfigError

PROJECTION, EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM = (
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
)
"""Names here of what a layer has besides those of the target."""


@dataclass(frozen=True, slots=True)
class _Naming:
    """What a family calls the parts of its MTP layers; ``N`` stands for a layer's number."""

    layer: str
    """What the names of a layer's own weights begin with."""
    root: str
    """What the names of all that is of MTP begin with."""
    parts: Mapping[str, str]
    """Its names of what a layer has besides."""
    copies: tuple[str, ...] = ()
    """Copies of the target's head and embedding, which need not be there."""
    is_hidden_first: bool = False
    """The projection reads the hidden state before the embedding."""
    is_counted_on: bool = False
    """Numbers go on after the target's layers; else they begin with 0."""

    def of(self, number: int) -> _Naming:
        """The names of one layer."""

        def numbered(name: str) -> str:
            return name.replace(".N.", f".{number}.")

        return replace(
            self,
            layer=numbered(self.layer),
            root=numbered(self.root),
            parts={part: numbered(name) for part, name in self.parts.items()},
            copies=tuple(map(numbered, self.copies)),
        )


def _parts(projection: str, embedding_norm: str, hidden_norm: str, output_norm: str) -> dict[str, str]:
    names = (projection, embedding_norm, hidden_norm, output_norm)
    parts = (PROJECTION, EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM)
    return {part: f"{name}.weight" for part, name in zip(parts, names, strict=True)}


_NAMINGS = (
    # DeepSeek, GLM.
    _Naming(
        "model.layers.N.",
        "model.layers.N.",
        {part: f"model.layers.N.{part}" for part in (PROJECTION, EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM)},
        ("model.layers.N.shared_head.head.weight", "model.layers.N.embed_tokens.weight"),
        is_counted_on=True,
    ),
    # llama.cpp.
    _Naming(
        f"{PREDICTORS}N.",
        PREDICTORS,
        {part: f"{PREDICTORS}N.{part}" for part in (PROJECTION, EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM)},
        (f"{PREDICTORS}N.shared_head.head.weight", f"{PREDICTORS}N.embed_tokens.weight"),
    ),
    # MiMo.
    _Naming(
        "model.mtp_layers.N.",
        "model.mtp_layers.",
        _parts(
            *(
                f"model.mtp_layers.N.{name}"
                for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
            )
        ),
        is_hidden_first=True,
    ),
    # Qwen3-Next, Qwen3.5, Mellum: all layers share what is not of one.
    _Naming(
        "mtp.layers.N.",
        "mtp.",
        _parts("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        ("mtp.lm_head.weight", "mtp.embed_tokens.weight"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout(DrafterLayout):
    """The MTP layers of the target's checkpoint, which ``path`` names."""

    config: DecoderConfig
    """Configuration of the MTP layers alone."""
    is_hidden_first: bool
    described: ModelDescription
    names: Mapping[str, str]
    """Names in the files, by those of the decoder and of what a layer has besides."""
    formats: WeightFormats
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def num_weights(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def reads_embedding(self) -> bool:
        return True

    @property
    def reads_head(self) -> bool:
        return True

    @property
    def one_pass_kind(self) -> str | None:
        return None if self.num_layers == 1 else "several MTP layers in turn"

    @property
    def mask_group_size(self) -> int:
        shape = head_shape(self.config, None)
        return shape.num_heads // shape.num_kv_heads

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape.of_layers([head_shape(self.config, None).of_layer] * self.num_layers)

    def bytes_per_token(self, item_bytes: int) -> int:
        return item_bytes * (self.hidden_size + self.cache_shape.num_numbers)

    def num_step_numbers(self, num_tokens: int) -> int:
        return num_tokens * sum(
            shape[0] for name, shape in self.shapes.items() if len(shape) == 2 and ".experts." not in name
        )

    def open(self, dtype: torch.dtype, device: torch.device) -> NamedWeights:
        """Its weights, by the names in ``names``."""
        decoder, has_kernels = self.described.decoder, has_own_kernels(device, dtype)
        assert decoder is not None, "the reader has refused others"
        own = self.formats.has_own_bits and has_kernels
        weights, _ = open_weights(
            self.path, self.described, decoder, dtype=dtype, device=device, has_own_bits=own
        )
        weights.rename(self.names)
        weights.keep_wide(self.config.wide_weights())
        return weights


def read_mtp(args: ModelArgs, target: TargetShape, dtype: torch.dtype) -> MtpLayout:
    """Reads a target's MTP layers. ConfigError: there are none, or a tensor does not fit."""
    # Whatever runs the target, these are layers of the decoder.
    described = describe(replace(args, forward="auto"))
    if described.decoder is None:
        raise ConfigError(
            f"target.drafter is {MTP!r}, and model {args.path!r} is of model type {described.model_type!r}, "
            "which forward hf runs; allowed: models of the decoder, or the directory of a drafter"
        )
    return _MtpReader(args, described, described.decoder, target, dtype).read()


class _MtpReader:
    """Finds the tensors of the layers."""

    def __init__(
        self,
        args: ModelArgs,
        described: ModelDescription,
        decoder: DecoderConfig,
        target: TargetShape,
        dtype: torch.dtype,
    ) -> None:
        self._path, self._target, self._args, self._described = args.path, target, args, described
        self._weights, self._decoder = open_weights(
            args.path, described, decoder, dtype=dtype, device=torch.device("cpu"), has_own_bits=False
        )
        self._stored = decoder_names(self._weights.shapes)
        """Names in the files, by those that MTP layers may have."""

    def read(self) -> MtpLayout:
        family, numbers = self._naming()
        layers = [family.of(number) for number in numbers]
        names: dict[str, str] = {}
        for index, naming in enumerate(layers):
            prefix = layer_prefix(index)
            names |= {
                prefix + name.removeprefix(naming.layer): name
                for name in self._stored
                if name.startswith(naming.layer)
                and name not in (*naming.parts.values(), *naming.copies)
                and not COMPUTED.search(name)
            }
            names |= {prefix + part: name for part, name in naming.parts.items()}
        self._check_beside(layers, set(names.values()))
        config = self._config(len(layers), set(names))
        shapes = {name: self._shape(stored) for name, stored in names.items() if stored in self._stored}
        config = as_stored(config, shapes)
        expected = self._expected(config)
        self._check_shapes(names, shapes, expected, layers)
        stored = {name: self._stored[names[name]] for name in expected}
        for name in expected:
            if name.endswith("norm.weight"):
                check_weight(self._path, names[name], self._weights.read(stored[name]))
        return MtpLayout(
            path=self._path,
            feature_layers=(self._target.num_layers + 1,),
            hidden_size=self._target.hidden_size,
            config=config,
            is_hidden_first=family.is_hidden_first,
            described=self._described,
            names=stored,
            formats=self._args.formats,
            shapes=expected,
        )

    def _naming(self) -> tuple[_Naming, list[int]]:
        """The family's names, and the numbers of its layers."""
        for family in _NAMINGS:
            first = self._target.num_layers if family.is_counted_on else 0
            if family.of(first).parts[PROJECTION] in self._stored:
                break
        else:
            known = ", ".join(each.of(self._target.num_layers).parts[PROJECTION] for each in _NAMINGS)
            raise ConfigError(
                f"target.drafter is {MTP!r}, and model {self._path!r} has no MTP layer (none of {known}); "
                "allowed: a model with one, or the directory of a drafter"
            )
        numbers: list[int] = []
        for number in count(first):
            prefix = family.of(number).layer
            if not any(name.startswith(prefix) for name in self._stored):
                return family, numbers
            numbers.append(number)
        raise AssertionError("names end")

    def _config(self, num_layers: int, names: set[str]) -> DecoderConfig:
        """Layers like the target's attending ones: with all tokens in sight, if some have them
        and the configuration does not say otherwise, as Mellum's does."""
        decoder, library = self._decoder, self._described.library
        kinds = None if library is None else getattr(library.text, "mtp_layer_types", None)
        has_window = kinds is not None and kinds[0] == "sliding_attention"
        alike = decoder.attention_layers
        wanted = [layer for layer in alike if (decoder.windows[layer] is not None) == has_window]
        [kind] = (wanted or alike)[-1:]
        is_dense = [f"{layer_prefix(layer)}mlp.gate_proj.weight" in names for layer in range(num_layers)]
        experts = decoder.experts
        if experts is not None:
            layers = tuple(not dense for dense in is_dense)
            experts = replace(experts, layers=layers) if any(layers) else None
        return replace(
            decoder,
            num_hidden_layers=num_layers,
            windows=(decoder.windows[kind],) * num_layers,
            own_ropes=tuple((layer, decoder.ropes[kind]) for layer in range(num_layers)),
            experts=experts,
            recurrent=None,
            attending=None,
            with_mlps=None,
            tie_word_embeddings=True,
        )

    def _expected(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        size = config.hidden_size
        shapes = {name: shape for name, shape in config.weight_shapes().items() if ".layers." in name}
        for layer in range(config.num_hidden_layers):
            own = dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM), (size,))
            shapes |= {
                layer_prefix(layer) + part: shape
                for part, shape in {**own, PROJECTION: (size, 2 * size)}.items()
            }
        return shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shapes[self._stored[name]]

    def _check_shapes(
        self,
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        expected: Mapping[str, tuple[int, ...]],
        layers: list[_Naming],
    ) -> None:
        def stored(name: str) -> str:
            index = int(name.split(".")[2])
            return names.get(name, layers[index].layer + name.removeprefix(layer_prefix(index)))

        for problem, found in (
            ("lacks", expected.keys() - shapes.keys()),
            ("has no place for", shapes.keys() - expected.keys()),
        ):
            if found:
                raise ConfigError(
                    f"model {self._path!r}: its MTP layer {problem} {listed(map(stored, found))}"
                )
        for name, shape in expected.items():
            if shapes[name] != shape:
                raise ConfigError(
                    f"model {self._path!r}: {stored(name)} is {list(shapes[name])}; allowed: {list(shape)}"
                )

    def _check_beside(self, layers: list[_Naming], used: set[str]) -> None:
        """Raises ConfigError for what stands beside the layers and is nothing that is read."""
        copies = {name for naming in layers for name in naming.copies}
        own = tuple(naming.layer for naming in layers)
        roots = tuple(naming.root for naming in layers)
        rest = (name for name in self._stored if name.startswith(roots) and not name.startswith(own))
        unknown = [name for name in rest if name not in used | copies]
        if unknown:
            allowed = sorted({name for naming in layers for name in naming.parts.values()} | copies)
            raise ConfigError(
                f"model {self._path!r}: its MTP layer has no place for {listed(unknown)}; allowed with "
                f"{layers[0].root}: {', '.join(allowed)} and {layers[0].layer}*"
            )
        for name in sorted(copies & self._stored.keys()):
            of_target = [EMBEDDING] if name.endswith("embed_tokens.weight") else [HEAD, EMBEDDING]
            whole = next((each for each in of_target if each in self._stored), None)
            is_same = whole is not None and self._shape(whole) == self._shape(name)
            if not is_same or not torch.equal(self._read(name), self._read(str(whole))):
                raise ConfigError(
                    f"model {self._path!r}: {name} is not the target's {of_target[0]}; allowed: a copy of it"
                )

    def _read(self, name: str) -> torch.Tensor:
        return self._weights.read(self._stored[name])
