"""LoRA adapters (Hu et al., 2021) as peft writes them, merged into the weights of a model when they are read.

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

from specray.engine.model.checkpoint.headers import TensorHeader, file_headers, read_json
from specray.engine.model.checkpoint.names import decoder_name
from specray.engine.model.checkpoint.source import WeightPart, WeightSource
from specray.engine.model.checks.messages import one_line
from specray.engine.model.checks.weights import listed
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE_PREFIX = "model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
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

    path: str
    config: Mapping[str, Any]
    layers: Mapping[str, AdaptedLayer]
    """By the name of the weight in the base."""

    def placed(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdaptedLayer]:
        """The layers by the model's weight names; ConfigError: no such weight, or one of another shape."""
        found = {self._known(name, shapes): layer for name, layer in self.layers.items()}
        if len(found) < len(self.layers):
            raise _refused(self.path, f"adapts a weight under two names: {listed(list(self.layers))}")
        missing = [name for name in found if name not in shapes]
        if missing:
            raise _refused(self.path, f"adapts weights for which the model has no place: {listed(missing)}")
        for name, layer in found.items():
            if shapes[name] != layer.shape:
                raise _refused(
                    self.path,
                    f"adapts {name} as {list(layer.shape)}, which the model has as {list(shapes[name])}",
                )
        return found

    def difference(self, layer: AdaptedLayer, part: WeightPart | None = None) -> torch.Tensor:
        """What is added to a weight or a part of it, float32. Raises ConfigError for a damaged file."""
        try:
            with safe_open(str(Path(self.path) / TENSOR_FILE), framework="pt", device="cpu") as file:
                down, up = file.get_tensor(layer.down).float(), file.get_tensor(layer.up).float()
        except (OSError, SafetensorError) as error:
            raise _refused(self.path, f"cannot be read: {one_line(error)}") from None
        if part is not None and part.dim == 0:
            up = up[part.start : part.stop]
        elif part is not None:
            down = down[:, part.start : part.stop]
        product: torch.Tensor = up @ down
        return product.mul_(self._scale(layer))

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
            raise _refused(self.path, f"makes the weight {name!r} hold NaN or infinite values")
        return total

    def _known(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Adapters of a model without its head lack the prefix of all names."""
        names = (name, f"{_BASE_PREFIX}{name}", decoder_name(name), f"{_BASE_PREFIX}{decoder_name(name)}")
        return next((known for known in names if known in shapes), name)

    def _scale(self, layer: AdaptedLayer) -> float:
        alphas: Mapping[str, Any] = self.config.get("alpha_pattern") or {}
        module = layer.down.removeprefix(_PREFIX).removesuffix(_DOWN)
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


def read_adapter(path: str) -> Adapter:
    """Configuration and tensor shapes of an adapter. Raises ConfigError naming what is not merged."""
    directory = Path(path).expanduser()
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (directory / name).is_file():
            raise ConfigError(
                f"target.adapter is {path!r}; allowed: a directory with {CONFIG_FILE} and {TENSOR_FILE}"
            )
    config = read_json(directory / CONFIG_FILE)
    _check_config(path, config)
    return Adapter(str(directory), config, _layers(path, file_headers(directory / TENSOR_FILE)))


def _check_config(path: str, config: Mapping[str, Any]) -> None:
    alphas = config.get("alpha_pattern") or {}
    if config.get("peft_type") != "LORA":
        raise _refused(path, f"has peft_type {config.get('peft_type')!r}; allowed: 'LORA'")
    if not isinstance(alphas, Mapping) or not all(
        _is_number(alpha) for alpha in (config.get("lora_alpha"), *alphas.values())
    ):
        raise _refused(path, "has no number in lora_alpha or alpha_pattern")
    try:
        for pattern in alphas:
            re.compile(pattern)
    except re.error as error:
        raise _refused(path, f"has a pattern in alpha_pattern that cannot be read: {error}") from None
    if config.get("init_lora_weights") not in _STARTS:
        raise _refused(
            path,
            f"has init_lora_weights {config['init_lora_weights']!r}, which changes the base's weights; "
            "allowed: an adapter to the base as it is published",
        )
    if config.get("bias") not in (None, "none"):
        raise _refused(path, f"has bias {config['bias']!r}; allowed: 'none'")
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT | _READ | {"bias", "init_lora_weights"} and value:
            raise _refused(path, f"has {name} {value!r}, which is not merged; allowed: none")


def _layers(path: str, headers: Mapping[str, TensorHeader]) -> dict[str, AdaptedLayer]:
    layers: dict[str, AdaptedLayer] = {}
    for name, header in headers.items():
        module = name.removesuffix(_DOWN).removesuffix(_UP)
        if module == name or len(header.shape) != 2 or header.dtype not in ("F32", "F16", "BF16"):
            raise _refused(
                path,
                f"holds {header.dtype} tensor {name!r} of shape {list(header.shape)}; allowed: "
                f"matrices NAME{_DOWN} and NAME{_UP}",
            )
        down, up = headers.get(f"{module}{_DOWN}"), headers.get(f"{module}{_UP}")
        if down is None or up is None or len(up.shape) != 2 or not down.shape[0] == up.shape[1] > 0:
            raise _refused(path, f"has no pair of matrices that fit each other for {module!r}")
        weight = f"{module.removeprefix(_PREFIX)}.weight"
        shape = up.shape[0], down.shape[1]
        layers[weight] = AdaptedLayer(f"{module}{_DOWN}", f"{module}{_UP}", down.shape[0], shape)
    if not layers:
        raise _refused(path, f"holds no tensors, or {TENSOR_FILE} is damaged")
    return layers


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refused(path: str, problem: str) -> ConfigError:
    return ConfigError(f"target.adapter {path!r} {problem}")
