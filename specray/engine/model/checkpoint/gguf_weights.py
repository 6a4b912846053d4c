"""Weights straight from a GGUF file under the names of the decoder, in the file's own bits or dequantised.

The file is ``model.gguf`` of a *light checkpoint*: a directory that holds everything else, such as
config.json and the tokenizer, as other checkpoints do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specray.engine.model.checkpoint.gguf_file import GgufFile, GgufTensor
from specray.engine.model.checkpoint.source import NamedWeights, WeightPart
from specray.engine.model.decoder_config import (
    ATTENTION_NORM,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    SINKS,
    DecoderConfig,
    layer_prefix,
)
from specray.engine.model.layers.experts.config import (
    CHOICE_BIAS,
    ROUTER,
    SHARED,
    SHARED_GATE,
    expert_prefix,
)
from specray.engine.model.layers.recurrent_config import RATES, ConvolutionLayers, DeltaLayers
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


_log = logging.getLogger(__name__)

_LLAMA = "llama"
"""Architecture whose files have the rows of queries and keys in another order."""
_HYBRIDS = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose recurrent layers have value heads in another order, and rates in place of logs."""
_SHIFTED = _HYBRIDS | {"gemma3"}
"""Architectures whose files hold the norms' weights with the one that checkpoints leave out."""
_ENDS = {"token_embd.weight": EMBEDDING, "output.weight": HEAD}
_ENDS |= dict.fromkeys(("output_norm.weight", "token_embd_norm.weight"), FINAL_NORM)
_ATTENTION = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    RATES: "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_CONVOLUTION = {name: f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")}
_MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "gate_up_proj": "ffn_up", "down_proj": "ffn_down"}
_ROUTER = "ffn_gate_inp"
_SHARED_GATE = "ffn_gate_inp_shexp"
_WHOLE_NAMES = {CHOICE_BIAS: "exp_probs_b.bias", SINKS: "attn_sinks.weight"}
"""Names of a layer's tensors that are no weight or bias of a part in a checkpoint."""
_CONVOLUTION_DIMS = 3
"""Dimensions of a convolution's weight here; files leave out the one in the middle."""
_PREDICTOR = "nextn.eh_proj.weight"
"""What only layers have that predict several tokens at once."""
_PREDICTING = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
PREDICTORS = "nextn.layers."
"""What their names begin with here, before the number of each."""
_ROTARY = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that config.json speaks of."""


@dataclass(frozen=True, slots=True)
class _TensorRows:
    """Where a weight lies: some rows of a tensor, in their order or another."""

    tensor: str
    first: int
    shape: tuple[int, ...]
    order: torch.Tensor | None = None
    """Row of the tensor, from the first on, of each row of the weight; None: as they are."""
    columns: torch.Tensor | None = None
    """Order of input features."""


class GgufWeights(NamedWeights):
    """Implements ``source.WeightSource`` over a GGUF file.

    Args:
        path: the model as the user wrote it, for messages.
        file: the GGUF file.
        config: of the model.
        dtype, device: of the tensors that :meth:`take` gives; norms and biases that it would round stay in
            float32.
        has_own_bits: :meth:`stored` gives weights.

    Raises:
        ConfigError: as ``GgufFile``.
    """

    def __init__(
        self,
        path: str,
        file: Path,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_own_bits: bool,
    ) -> None:
        self._dtype, self._device, self._has_own_bits = dtype, device, has_own_bits
        self._file = GgufFile(file, path)
        self._places = dict(_places(config, self._file))
        used = {place.tensor for place in self._places.values()} | _ROTARY
        rest = {name: tensor.shape for name, tensor in self._file.tensors.items() if name not in used}
        super().__init__(path, {name: place.shape for name, place in self._places.items()} | rest)
        self._warned: set[str] = set()

    def decoder_config(self, config: DecoderConfig) -> DecoderConfig:
        """What the file's numbers are in terms of the decoder: norms may be stored with their one."""
        is_shifted = config.has_shifted_norms and self._file.architecture not in _SHIFTED
        recurrent = config.recurrent
        if isinstance(recurrent, DeltaLayers):
            recurrent = replace(recurrent, has_rates=self._file.architecture in _HYBRIDS)
        return replace(config, has_shifted_norms=is_shifted, recurrent=recurrent)

    @property
    def stored_bytes(self) -> Mapping[str, int]:
        return {
            name: self._place(name).shape[0] * tensor.row_bytes
            for name in self.shapes
            if (tensor := self._held(name)) is not None
        }

    @property
    def stored_formats(self) -> Mapping[str, str]:
        found = {name: self._held(name) for name in self.shapes}
        return {name: tensor.format for name, tensor in found.items() if tensor is not None}

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        tensor = self._held(name)
        if tensor is None or self._cuts_a_unit(name, tensor, part):
            return None
        whole, place = self._file.stored(*self._run(name, part)), self._place(name)
        weight = StoredWeight((whole if place.columns is None else whole.reordered(place.columns),))
        if place.order is not None:
            weight = weight.select(place.order[_rows(place, part)])
        if part is not None and part.dim == 1:
            weight = weight.columns(part.start, part.stop)
        if not weight.is_finite():
            raise ConfigError(f"model {self._path!r}: the weight {name!r} holds NaN or infinite values")
        return weight

    def read(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        place = self._place(name)
        tensor = self._file.tensors[place.tensor]
        if isinstance(tensor.kind, BlockType):
            weight = self._file.stored(*self._run(name, part)).values(self._dtype)
        else:
            weight = self._converted(name, self._file.numbers(*self._run(name, part)))
        if len(place.shape) == 1:
            # The whole vector was read.
            vector = weight.view(-1)
            weight = vector if place.order is None else vector[place.order]
            weight = weight[_rows(place, part)]
        elif place.order is not None:
            weight = weight[place.order[_rows(place, part)]]
        if place.columns is not None:
            weight = weight[:, place.columns]
        if part is not None and part.dim == 1:
            weight = weight[:, part.start : part.stop]
        weight = weight.to(self._device).contiguous()
        return weight[:, None] if len(place.shape) == _CONVOLUTION_DIMS else weight

    def _converted(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers in the type of the model, or float32 for a vector that would be rounded."""
        converted = numbers.to(self._dtype)
        if numbers.dtype == self._dtype or torch.equal(converted.float(), numbers.float()):
            return converted
        if len(self.shapes[name]) == 1 or name in self._wide:
            return numbers.float()
        kind = str(numbers.dtype).removeprefix("torch.")
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "%s: %s and maybe others are %s and are rounded to dtype, which is %s; allowed for all their "
                "digits: dtype float32",
                self._path,
                name,
                kind,
                str(self._dtype).removeprefix("torch."),
            )
        return converted

    def _place(self, name: str) -> _TensorRows:
        return self._places[self._names[name]]

    def _held(self, name: str) -> GgufTensor | None:
        """The tensor of a weight that is given in its own bits."""
        place = self._places.get(self._names[name])
        if place is None or not self._has_own_bits or len(place.shape) != 2:
            return None
        tensor = self._file.tensors[place.tensor]
        is_half = not isinstance(tensor.kind, BlockType)
        # Other devices multiply with numbers of the rows' type alone.
        is_held = tensor.unit is not None and (not is_half or self._device.type == "cpu")
        if is_held and place.columns is not None and not _keeps_units(place.columns, tensor.unit or 1):
            self._warn(name, f"heads of {tensor.format} lie in another order in the file, which cuts blocks")
            return None
        return tensor if is_held and _ROUTER not in place.tensor else None

    def _cuts_a_unit(self, name: str, tensor: GgufTensor, part: WeightPart | None) -> bool:
        size = tensor.unit
        if size is None or part is None or part.dim != 1 or not (part.start % size or part.stop % size):
            return False
        self._warn(name, f"a rank's {part.stop - part.start} input features are no whole blocks of {size}")
        return True

    def _warn(self, name: str, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s: %s and maybe others are dequantised to dtype: %s", self._path, name, reason)

    def _run(self, name: str, part: WeightPart | None) -> tuple[str, int, int]:
        """The tensor, and which of its rows are read: all of a weight whose rows are in another order."""
        place = self._place(name)
        tensor = self._file.tensors[place.tensor]
        if len(tensor.shape) == 1 or len(place.shape) == 1:
            # A vector is one row.
            return place.tensor, place.first, place.first + 1
        rows = _rows(place, None if place.order is not None else part)
        return place.tensor, place.first + rows.start, place.first + rows.stop


def _rows(place: _TensorRows, part: WeightPart | None) -> slice:
    if part is None or part.dim != 0:
        return slice(0, place.shape[0])
    return slice(part.start, part.stop)


def _places(config: DecoderConfig, file: GgufFile) -> Iterator[tuple[str, _TensorRows]]:
    """The decoder's weights that the file holds, by name, each as its own shape says."""
    for tensor, name in _ENDS.items():
        if tensor in file.tensors:
            yield name, _whole(file, tensor)
    for layer in range(config.num_hidden_layers):
        for name, place in _layer_places(config, layer, file):
            yield f"{layer_prefix(layer)}{name}", place
    for number in count():
        layer = config.num_hidden_layers + number
        if f"blk.{layer}.{_PREDICTOR}" not in file.tensors:
            break
        for name, place in _layer_places(config, layer, file):
            yield f"{PREDICTORS}{number}.{name}", place


def _layer_places(config: DecoderConfig, layer: int, file: GgufFile) -> Iterator[tuple[str, _TensorRows]]:
    """A layer's weights, by their names in it; also of one after the last, which predicts further tokens."""
    names, recurrent = _layer_names(config, layer, file), config.recurrent
    if isinstance(recurrent, DeltaLayers) and recurrent.layers[layer : layer + 1] == (True,):
        names = {name: tensor for name, tensor in names.items() if tensor not in _ATTENTION.values()}
        for name, tensor in _DELTA.items():
            if (stored := f"blk.{layer}.{tensor}") in file.tensors:
                yield f"{recurrent.prefix}{name}", _delta_place(recurrent, name, stored, file)
    for name, tensor in names.items():
        for suffix in ("weight", "bias"):
            if (stored := f"blk.{layer}.{tensor}.{suffix}") in file.tensors:
                place = _whole(file, stored)
                if tensor == _SHARED_GATE:
                    # One product's weight is a vector there.
                    place = replace(place, shape=(1, place.shape[-1]))
                if tensor == _CONVOLUTION["conv"] and suffix == "weight":
                    place = replace(place, shape=(place.shape[0], 1, *place.shape[1:]))
                yield f"{name}.{suffix}", _ordered(place, name, config, file)
    for name, tensor in _WHOLE_NAMES.items():
        if (stored := f"blk.{layer}.{tensor}") in file.tensors:
            yield name, _whole(file, stored)
    yield from _experts(config, layer, file)


def _delta_place(layers: DeltaLayers, name: str, stored: str, file: GgufFile) -> _TensorRows:
    """A weight of a recurrent layer: files have the first value head of each key head, then the second ..."""
    place, keys = _whole(file, stored), layers.num_key_heads
    if name == "norm.weight":
        return place
    rows, first = place.shape[-1 if name == "out_proj.weight" else 0], 0
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * keys * layers.key_dim
    if (rows - first) % layers.num_heads or rows < first:
        return place
    own = torch.arange(first, rows).view(layers.num_heads // keys, keys, -1).transpose(0, 1).reshape(-1)
    order = torch.cat((torch.arange(first), own))
    if name == "conv1d.weight":
        place = replace(place, shape=(rows, 1, *place.shape[1:]))
    return replace(place, columns=order) if name == "out_proj.weight" else replace(place, order=order)


def _keeps_units(columns: torch.Tensor, unit: int) -> bool:
    """Whether an order of input features takes units as a whole."""
    if len(columns) % unit:
        return False
    runs = columns.view(-1, unit)
    return bool((runs == runs[:, :1] + torch.arange(unit)).all() and (runs[:, 0] % unit == 0).all())


def _whole(file: GgufFile, tensor: str) -> _TensorRows:
    return _TensorRows(tensor, 0, file.tensors[tensor].shape)


def _layer_names(config: DecoderConfig, layer: int, file: GgufFile) -> dict[str, str]:
    """Names of a layer's parts in a checkpoint, and in the file."""
    names = {f"self_attn.{name}": stored for name, stored in _ATTENTION.items()}
    names[INPUT_NORM] = "attn_norm"
    if isinstance(config.recurrent, ConvolutionLayers):
        names |= {f"{config.recurrent.prefix}{name}": stored for name, stored in _CONVOLUTION.items()}
    if config.has_sandwich_norms:
        names |= {
            ATTENTION_NORM: "post_attention_norm",
            MLP_NORM: "ffn_norm",
            MLP_OUTPUT_NORM: "post_ffw_norm",
        }
    else:
        # GLM 4.5 and gpt-oss.
        has_other = f"blk.{layer}.post_attention_norm.weight" in file.tensors
        names[ATTENTION_NORM] = "post_attention_norm" if has_other else "ffn_norm"
    if layer >= config.num_hidden_layers:
        names |= _PREDICTING
    if _has_experts(config, layer, file):
        shared = {f"{SHARED}.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
        return names | shared | {ROUTER: _ROUTER, SHARED_GATE: _SHARED_GATE}
    left_out = ("gate_proj", "up_proj") if config.has_joined_gates else ("gate_up_proj",)
    return names | {f"mlp.{name}": stored for name, stored in _MLP.items() if name not in left_out}


def _experts(config: DecoderConfig, layer: int, file: GgufFile) -> Iterator[tuple[str, _TensorRows]]:
    """Each expert's part of the tensors that hold all experts of a layer."""
    experts = config.experts
    if experts is None or not _has_experts(config, layer, file):
        return
    for name in ("gate", "up", "down"):
        tensor = f"blk.{layer}.ffn_{name}_exps.weight"
        found = file.tensors.get(tensor)
        if found is None or len(found.shape) != 3 or found.shape[0] != experts.num_experts:
            continue
        _, rows, columns = found.shape
        for number in range(experts.num_experts):
            prefix = expert_prefix(number)
            yield f"{prefix}{name}_proj.weight", _TensorRows(tensor, number * rows, (rows, columns))
            if (bias := tensor.replace(".weight", ".bias")) in file.tensors:
                yield f"{prefix}{name}_proj.bias", _TensorRows(bias, number, (rows,))


def _has_experts(config: DecoderConfig, layer: int, file: GgufFile) -> bool:
    if layer >= config.num_hidden_layers:
        return config.experts is not None and f"blk.{layer}.{_ROUTER}.weight" in file.tensors
    return config.experts is not None and config.experts.layers[layer]


def _ordered(place: _TensorRows, name: str, config: DecoderConfig, file: GgufFile) -> _TensorRows:
    """Llama's files have the numbers that are rotated together next to each other; here they lie half a head
    apart."""
    num_heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }.get(name)
    if file.architecture != _LLAMA or num_heads is None or place.shape[0] % (2 * num_heads):
        return place
    rows = torch.arange(place.shape[0]).view(num_heads, -1, 2)
    return replace(place, order=rows.transpose(1, 2).reshape(-1))
