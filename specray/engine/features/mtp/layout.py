"""Reads an MTP layer out of a target's checkpoint, whichever family's names it has.

Such a layer is one of the target's own kind, after a projection of an embedding and a hidden state. It is
loaded as a model of one layer: the library then reads weights and computes the layer as the target's own.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specray.config import MTP
from specray.engine.features.base import TargetShape
from specray.engine.features.layout import DrafterLayout
from specray.engine.model.checkpoint.location import find_weights
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checks.weights import check_weight, listed
from specray.engine.model.decoder_config import EMBEDDING, HEAD
from specray.engine.model.description import ModelArgs, describe
from specray.errors import ConfigError
from specray.gguf.light import check_has_safetensors

if TYPE_CHECKING:
    from specray.engine.model.hf_forward import HfForward

_LAYER = "model.layers.0."
_NUM_TOKENS = 16
"""Token ids of the model of one layer, which is given embeddings and asked for hidden states."""


@dataclass(frozen=True, slots=True)
class _Naming:
    """What a family calls the parts of its MTP layers."""

    layer: str
    """What the names of a layer's own weights begin with; N: its number, after the target's layers."""
    root: str
    """What the names of all that is of MTP begin with."""
    projection: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str
    copies: tuple[str, ...] = ()
    """Copies of the target's head and embedding, which need not be there."""
    is_hidden_first: bool = False
    """The projection reads the hidden state before the embedding."""
    drops_first: bool = True
    """The first entry of a sequence has no embedding."""


_NAMINGS = {
    "DeepSeek, GLM": _Naming(
        "model.layers.N.",
        "model.layers.N.",
        "model.layers.N.eh_proj.weight",
        "model.layers.N.enorm.weight",
        "model.layers.N.hnorm.weight",
        "model.layers.N.shared_head.norm.weight",
        ("model.layers.N.shared_head.head.weight", "model.layers.N.embed_tokens.weight"),
    ),
    "MiMo": _Naming(
        "model.mtp_layers.0.",
        "model.mtp_layers.",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.final_layernorm.weight",
        is_hidden_first=True,
    ),
    "Qwen3-Next": _Naming(
        "mtp.layers.0.",
        "mtp.",
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        ("mtp.lm_head.weight", "mtp.embed_tokens.weight"),
        drops_first=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout(DrafterLayout):
    """An MTP layer of the target's checkpoint, which ``path`` names."""

    forward: HfForward
    """The layer, and the norm after it, over a block cache."""
    projection: torch.Tensor
    embedding_norm: torch.nn.Module
    hidden_norm: torch.nn.Module
    is_hidden_first: bool
    drops_first: bool

    @property
    def num_weights(self) -> int:
        layer = sum(weight.numel() for weight in self.forward.model.parameters())
        return self.projection.numel() + layer

    @property
    def reads_embedding(self) -> bool:
        return True

    @property
    def reads_head(self) -> bool:
        return True

    @property
    def mask_group_size(self) -> int:
        num_heads: int = self.forward.model.config.get_text_config().num_attention_heads
        return num_heads // self.forward.cache_shape.layers[0].num_kv_heads

    def bytes_per_token(self, item_bytes: int) -> int:
        return item_bytes * (self.hidden_size + self.forward.cache_shape.num_numbers)

    def num_step_numbers(self, num_tokens: int) -> int:
        weights = self.forward.model.parameters()
        return num_tokens * sum(weight.shape[0] for weight in weights if weight.ndim == 2)


def read_mtp(args: ModelArgs, target: TargetShape, dtype: torch.dtype) -> MtpLayout:
    """Reads a target's MTP layer. ConfigError: none, several, quantised, or a tensor does not fit."""
    return _MtpReader(args, target, dtype).read()


class _MtpReader:
    """Takes the tensors of one layer."""

    def __init__(self, args: ModelArgs, target: TargetShape, dtype: torch.dtype) -> None:
        described = describe(args)
        self._path, self._target, self._dtype = args.path, target, dtype
        directory = None if described.directory is None else find_weights(args.path, described.directory)
        if described.stored is not None or directory is None:
            raise ConfigError(
                f"target.drafter is {MTP!r}, and model {args.path!r} is quantised or not on this machine; "
                "allowed: a local model with plain weights"
            )
        check_has_safetensors(args.path, f"target.drafter {MTP!r}")
        self._text = _text_config(args.path, described)
        entry = None if described.library is None else described.library.weights_entry
        self._weights = SafetensorsWeights(
            args.path, directory, dtype=dtype, device=torch.device("cpu"), entry=entry
        )

    def read(self) -> MtpLayout:
        naming = self._naming()
        size, path = self._target.hidden_size, self._path
        projection = self._take(naming.projection, size, 2 * size)
        norms = [self._take(name, size) for name in (naming.embedding_norm, naming.hidden_norm)]
        self._check_copies(naming)
        special = {naming.projection, naming.embedding_norm, naming.hidden_norm, naming.final_norm}
        rest = [
            name
            for name in self._weights.shapes
            if name.startswith(naming.root) and name not in special and name not in naming.copies
        ]
        unknown = [name for name in rest if not name.startswith(naming.layer)]
        if unknown:
            raise ConfigError(
                f"model {path!r}: its MTP layer has no place for {listed(unknown)}; allowed with "
                f"{naming.root}: {', '.join(sorted({*special, *naming.copies}))} and {naming.layer}*"
            )
        names = {_LAYER + name.removeprefix(naming.layer): name for name in rest}
        state = {name: self._weights.take(stored) for name, stored in names.items()}
        state["model.norm.weight"] = self._take(naming.final_norm, size)
        forward = self._load(state, naming)
        norm = getattr(forward.model.base_model, "norm", None)
        if not isinstance(norm, torch.nn.Module):
            raise ConfigError(
                f"model {path!r}: {type(forward.model).__name__} has no final norm to read MTP with"
            )
        return MtpLayout(
            path=path,
            feature_layers=(self._target.num_layers + 1,),
            hidden_size=size,
            forward=forward,
            projection=projection,
            embedding_norm=_like(path, naming.embedding_norm, norm, norms[0]),
            hidden_norm=_like(path, naming.hidden_norm, norm, norms[1]),
            is_hidden_first=naming.is_hidden_first,
            drops_first=naming.drops_first,
        )

    def _naming(self) -> _Naming:
        shapes, first = self._weights.shapes, self._target.num_layers
        namings = [self._numbered(each, first) for each in _NAMINGS.values()]
        found = [each for each in namings if each.projection in shapes]
        if not found:
            known = ", ".join(each.projection for each in namings)
            raise ConfigError(
                f"target.drafter is {MTP!r}, and model {self._path!r} has no MTP layer (none of {known}); "
                "allowed: a model with one, or the directory of a drafter"
            )
        [naming] = found
        prefix, number = re.fullmatch(r"(.*\.)(\d+)\.", naming.layer).groups()  # type: ignore[union-attr]
        following = f"{prefix}{int(number) + 1}."
        if any(name.startswith(following) for name in shapes):
            raise ConfigError(
                f"target.drafter is {MTP!r}, and model {self._path!r} has several MTP layers ({following}); "
                "allowed: one"
            )
        return naming

    def _numbered(self, naming: _Naming, number: int) -> _Naming:
        def numbered(name: str) -> str:
            return name.replace(".N.", f".{number}.")

        return replace(
            naming,
            layer=numbered(naming.layer),
            root=numbered(naming.root),
            projection=numbered(naming.projection),
            embedding_norm=numbered(naming.embedding_norm),
            hidden_norm=numbered(naming.hidden_norm),
            final_norm=numbered(naming.final_norm),
            copies=tuple(map(numbered, naming.copies)),
        )

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        found = self._weights.shapes.get(name)
        if found != shape:
            said = "is missing" if found is None else f"is {list(found)}"
            raise ConfigError(f"model {self._path!r}: {name} {said}; allowed: {list(shape)}")
        return self._weights.take(name)

    def _check_copies(self, naming: _Naming) -> None:
        shapes = self._weights.shapes
        for name in naming.copies:
            if name not in shapes:
                continue
            of_target = [EMBEDDING] if name.endswith("embed_tokens.weight") else [HEAD, EMBEDDING]
            whole = next((each for each in of_target if each in shapes), None)
            is_same = whole is not None and shapes[whole] == shapes[name]
            if not is_same or not torch.equal(self._weights.read(name), self._weights.read(str(whole))):
                raise ConfigError(
                    f"model {self._path!r}: {name} is not the target's {of_target[0]}; allowed: a copy of it"
                )

    def _load(self, state: dict[str, torch.Tensor], naming: _Naming) -> HfForward:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        from specray.engine.model.checks.modalities import quiet_library
        from specray.engine.model.hf_forward import HfForward

        config = _one_layer(self._text, is_dense=f"{_LAYER}mlp.gate_proj.weight" in state)
        generator = torch.Generator().manual_seed(0)
        size = (_NUM_TOKENS, self._target.hidden_size)
        state["model.embed_tokens.weight"] = torch.randn(size, generator=generator).to(self._dtype)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is None:
            raise ConfigError(
                f"target.drafter is {MTP!r}, and transformers has no text model of its own for model type "
                f"{config.model_type!r} of model {self._path!r}; allowed: a model with one, or the directory "
                "of a drafter"
            )
        with quiet_library():
            try:
                model, report = kind.from_pretrained(
                    None, config=config, state_dict=state, dtype=self._dtype, output_loading_info=True
                )
            except (ValueError, KeyError, RuntimeError, TypeError) as error:
                raise ConfigError(f"model {self._path!r}: its MTP layer cannot be loaded: {error}") from None
        for kind_of, words in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
            if report[kind_of]:
                names = [name.replace(_LAYER, naming.layer) for name in report[kind_of]]
                raise ConfigError(f"model {self._path!r}: its MTP layer {words} {listed(names)}")
        if report.get("mismatched_keys"):
            raise ConfigError(
                f"model {self._path!r}: its MTP layer has weights of another shape: "
                f"{listed(report['mismatched_keys'])}"
            )
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                check_weight(self._path, name.replace(_LAYER, naming.layer), weight)
        return HfForward(model.eval().requires_grad_(False))


def _text_config(path: str, described: Any) -> Any:
    """The text part as the library reads it, also where it was not asked."""
    if described.library is not None:
        return described.library.text
    from specray.engine.model import library

    return library.load_config(path, described.directory).text


def _one_layer(text: Any, *, is_dense: bool) -> Any:
    """Configuration of the MTP layer alone, which attends to all tokens; dense: one MLP, no experts."""
    config = deepcopy(text)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 1, _NUM_TOKENS, True
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    own = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["dense" if is_dense else "sparse"],
        "first_k_dense_replace": int(is_dense),
        "mlp_only_layers": [0] if is_dense else [],
        "decoder_sparse_step": 1,
    }
    for name, value in own.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _like(path: str, name: str, norm: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """A norm of the same kind with the weight of that name. Raises ConfigError: it needs more than that."""
    held = sorted(norm.state_dict())
    if held != ["weight"]:
        raise ConfigError(
            f"model {path!r}: {name} alone makes no {type(norm).__name__}, the target's kind of norm, which "
            f"holds {', '.join(held) or 'nothing'}; allowed: norms that hold a weight alone"
        )
    other = deepcopy(norm)
    other.load_state_dict({"weight": weight})
    return other
