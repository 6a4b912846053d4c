"""LoRA adapters (Hu et al., 2021) as peft writes them: merged into a model's weights when these are read, or
computed beside them.

A layer's weight becomes ``weight + scale * B @ A``. What a configuration may say beyond that (weights of
magnitude, biases, whole modules, layers that are repeated, ...) is refused by name: it would be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from specray.engine.model.checkpoint.headers import TensorHeader, file_headers, read_json
from specray.engine.model.checkpoint.names import decoder_name
from specray.engine.model.checkpoint.source import WeightPart, WeightSource
from specray.engine.model.checks.messages import one_line
from specray.engine.model.checks.weights import listed
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError, shown
from specray.json_files import parse_json

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE_PREFIX = "model."
_DOWN, _UP = ".lora_A", ".lora_B"
# Of an adapter's name in training some files keep the usual one.
_TENSOR = re.compile(rf"(?P<module>.*)(?P<kind>{re.escape(_DOWN)}|{re.escape(_UP)})(\.default)?\.weight")
_REPEATED = re.compile(r"[*+{]")  # With several in a pattern, its search might take for ever.
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Fields that say where layers were adapted or how they were trained; the tensors' names say it, too."""
_READ = frozenset({"peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora"})
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which the base's weights stay as they are."""


class AdaptedLayer(NamedTuple):
    """Both matrices of one layer: their names in the file, and their shapes."""

    module: str
    """Name that the layer had in training."""
    down: str
    up: str
    rank: int
    shape: tuple[int, int]
    """Shape of the weight, ``[out_features, in_features]``."""


class HasParameters(Protocol):
    """A model of the library, as far as it is changed here."""

    def named_parameters(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose configuration is understood."""

    label: str
    """What messages call it."""
    path: str
    config: Mapping[str, Any]
    layers: Mapping[str, AdaptedLayer]
    """Layers by the name of the weight in the base."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """By their names in the file; None: they are read there."""

    def placed(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdaptedLayer]:
        """The layers by the model's weight names; ConfigError: no such weight, or one of another shape."""
        found = {self._known(name, shapes): layer for name, layer in self.layers.items()}
        if len(found) < len(self.layers):
            raise _refused(self.label, f"adapts a weight under two names: {listed(list(self.layers))}")
        missing = [name for name in found if name not in shapes]
        if missing:
            raise _refused(self.label, f"adapts weights for which the model has no place: {listed(missing)}")
        for name, layer in sorted(found.items()):
            if shapes[name] != layer.shape:
                raise _refused(
                    self.label,
                    f"adapts {name} as {list(layer.shape)}, which the model has as {list(shapes[name])}",
                )
        return found

    def matrices(self, layer: AdaptedLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rank, in_features]``, and ``[out_features, rank]`` times the scale; float32.

        Raises ConfigError for a damaged file.
        """
        if self.tensors is not None:
            down, up = self.tensors[layer.down], self.tensors[layer.up]
        else:
            try:
                with safe_open(str(Path(self.path) / TENSOR_FILE), framework="pt", device="cpu") as file:
                    down, up = file.get_tensor(layer.down), file.get_tensor(layer.up)
            except (OSError, SafetensorError) as error:
                raise _refused(self.label, f"cannot be read: {one_line(error)}") from None
        return down.float(), up.float() * self._scale(layer)

    def difference(self, layer: AdaptedLayer, part: WeightPart | None = None) -> torch.Tensor:
        """What is added to a weight or a part of it, float32. Raises ConfigError for a damaged file."""
        down, up = self.matrices(layer)
        if part is not None and part.dim == 0:
            up = up[part.start : part.stop]
        elif part is not None:
            down = down[:, part.start : part.stop]
        return up @ down

    def merge(self, model: HasParameters) -> None:
        """Adds every layer's difference to a model's parameters. Raises as :meth:`placed`, or for NaN."""
        parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        placed = self.placed({name: tuple(tensor.shape) for name, tensor in parameters.items()})
        for name, layer in placed.items():
            weight = parameters[name].data
            weight.copy_(self.merged(weight, name, layer))

    def merged(
        self, weight: torch.Tensor, name: str, layer: AdaptedLayer, part: WeightPart | None = None
    ) -> torch.Tensor:
        """A weight or a part of it with what is added, float32. Raises ConfigError for NaN and infinity."""
        total = weight.float() + self.difference(layer, part).to(weight.device)
        if not bool(torch.stack(torch.aminmax(total)).isfinite().all()):
            raise _refused(self.label, f"makes the weight {name!r} hold NaN or infinite values")
        return total

    def _known(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Adapters of a model without its head lack the prefix of all names."""
        names = (name, f"{_BASE_PREFIX}{name}", decoder_name(name), f"{_BASE_PREFIX}{decoder_name(name)}")
        return next((known for known in names if known in shapes), name)

    def _scale(self, layer: AdaptedLayer) -> float:
        alphas: Mapping[str, Any] = self.config.get("alpha_pattern") or {}
        module = layer.module
        # As peft finds them: the first that is the end of the name that the layer had in training.
        own = (alphas[key] for key in alphas if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = float(next(own, self.config["lora_alpha"]))
        return alpha / (math.sqrt(layer.rank) if self.config.get("use_rslora") else layer.rank)


class AdaptedWeights:
    """Implements ``source.WeightSource``: weights with an adapter merged into them.

    Args:
        base: the weights without it.
        shapes: of the base's weights.

    Raises:
        ConfigError: as ``Adapter.placed``.
    """

    def __init__(self, base: WeightSource, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._base, self._adapter, self._layers = base, adapter, adapter.placed(shapes)

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        weight = self._base.take(name, part)
        layer = self._layers.get(name)
        if layer is None:
            return weight
        return self._adapter.merged(weight, name, layer, part).to(weight.dtype)

    def stored(self, name: str, part: WeightPart | None = None) -> StoredWeight | None:
        """A weight in the file's own bits; None for one that the adapter changes, which is in no file."""
        return None if name in self._layers else self._base.stored(name, part)


def read_adapter(path: str, *, setting: str = "target.adapter") -> Adapter:
    """Configuration and tensor shapes of an adapter. Raises ConfigError naming what is not computed.

    Args:
        setting: that names the path.
    """
    directory = Path(path).expanduser()
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (directory / name).is_file():
            raise ConfigError(
                f"{setting} is {path!r}; allowed: a directory with {CONFIG_FILE} and {TENSOR_FILE}"
            )
    config, label = read_json(directory / CONFIG_FILE), f"{setting} {path!r}"
    _check_config(label, config)
    headers = file_headers(directory / TENSOR_FILE)
    return Adapter(label, str(directory), config, _layers(label, headers))


def adapter_of(label: str, config_bytes: bytes, tensor_bytes: bytes, *, max_rank: int) -> Adapter:
    """An adapter from the bytes of its files, with its tensors.

    Args:
        label: what messages call it.

    Raises:
        ConfigError: with one sentence, for what is damaged or not computed here.
    """
    try:
        config = parse_json(CONFIG_FILE, config_bytes)
    except ValueError as error:
        raise _refused(label, f"has a damaged {CONFIG_FILE}: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise _refused(label, f"has no object in {CONFIG_FILE}")
    _check_config(label, config)
    try:
        tensors = load_tensors(tensor_bytes)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _refused(label, f"has a damaged {TENSOR_FILE}: {one_line(error)}") from None
    headers = {
        name: TensorHeader(_TYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    layers = _layers(label, headers)
    for name, layer in layers.items():
        if layer.rank > max_rank:
            raise _refused(label, f"has rank {layer.rank} at {name}; allowed: at most {max_rank}")
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise _refused(label, f"holds NaN or infinite values in {name!r}")
    return Adapter(label, "", config, layers, tensors)


def _check_config(label: str, config: Mapping[str, Any]) -> None:
    alphas = config.get("alpha_pattern") or {}
    if config.get("peft_type") != "LORA":
        raise _refused(label, f"has peft_type {config.get('peft_type')!r}; allowed: 'LORA'")
    if not isinstance(alphas, Mapping) or not all(
        _is_number(alpha) for alpha in (config.get("lora_alpha"), *alphas.values())
    ):
        raise _refused(label, "has no number in lora_alpha or alpha_pattern")
    try:
        for pattern in alphas:
            re.compile(pattern)
            if len(_REPEATED.findall(pattern)) > 1:
                raise _refused(
                    label, f"has the pattern {shown(pattern)} in alpha_pattern; allowed: one of *, + and {{"
                )
    except re.error as error:
        raise _refused(label, f"has a pattern in alpha_pattern that cannot be read: {error}") from None
    if config.get("init_lora_weights") not in _STARTS:
        raise _refused(
            label,
            f"has init_lora_weights {config['init_lora_weights']!r}, which changes the base's weights; "
            "allowed: an adapter to the base as it is published",
        )
    if config.get("bias") not in (None, "none"):
        raise _refused(label, f"has bias {config['bias']!r}; allowed: 'none'")
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT | _READ | {"bias", "init_lora_weights"} and value:
            raise _refused(label, f"has {name} {value!r}, which is not computed; allowed: none")


def _layers(label: str, headers: Mapping[str, TensorHeader]) -> dict[str, AdaptedLayer]:
    layers: dict[str, AdaptedLayer] = {}
    pairs: dict[str, dict[str, str]] = {}
    for name, header in headers.items():
        found = _TENSOR.fullmatch(name)
        if found is None or len(header.shape) != 2 or header.dtype not in _TYPES.values():
            raise _refused(
                label,
                f"holds {header.dtype} tensor {name!r} of shape {list(header.shape)}; allowed: "
                f"matrices NAME{_DOWN}.weight and NAME{_UP}.weight",
            )
        if pairs.setdefault(found["module"], {}).setdefault(found["kind"], name) != name:
            raise _refused(label, f"has two tensors for {found['module']}{found['kind']}")
    for name, pair in pairs.items():
        down, up = (headers[pair[kind]].shape if kind in pair else (0, 0) for kind in (_DOWN, _UP))
        if not down[0] == up[1] > 0:
            raise _refused(label, f"has no pair of matrices that fit each other for {name!r}")
        module = name.removeprefix(_PREFIX)
        layers[f"{module}.weight"] = AdaptedLayer(module, pair[_DOWN], pair[_UP], down[0], (up[0], down[1]))
    if not layers:
        raise _refused(label, f"holds no tensors, or {TENSOR_FILE} is damaged")
    return layers


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refused(label: str, problem: str) -> ConfigError:
    return ConfigError(f"{label} {problem}")
