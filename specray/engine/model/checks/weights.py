"""Checks a model's weights: that every tensor has its place, and that all are numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from specray.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MAX_LISTED = 4
"""Tensors that a message names; of more it says how many."""
# Tables that are computed, once saved with the weights.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|inv_freq|position_ids|masked_bias|rope\.freqs)$")
# What a multimodal checkpoint holds besides its language model.
_OTHER_MODALITY = re.compile(
    r"(^|\.)(vision\w*|visual|vit|image\w*|img\w*|audio\w*|speech\w*|embed_vision|embed_audio|multi_modal_projector"
    r"|mm_projector|patch_merger|video\w*)\."
)
PREDICTOR = re.compile(r"(^|\.)(mtp\w*|nextn\w*|eagle\w*)\.")
"""Names of layers that predict further tokens (MTP), which no other layers have."""
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def check_report(path: str, report: Mapping[str, Any], config: Any) -> None:
    """Raises ConfigError for weights that are missing, are of no use, or could not be converted.

    Args:
        report: the library's loading information.
        config: of the text part.
    """
    if report["missing_keys"]:
        # The library fills them with random numbers.
        raise ConfigError(f"model {path!r} lacks weights: {listed(report['missing_keys'])}")
    if report.get("mismatched_keys"):
        raise ConfigError(f"model {path!r} has weights of another shape: {listed(report['mismatched_keys'])}")
    if report.get("conversion_errors"):
        raise ConfigError(f"model {path!r} cannot be loaded: {listed(report['conversion_errors'])}")
    unexpected = sorted(report["unexpected_keys"])
    predictors = [name for name in unexpected if _is_predictor(name, config)]
    if predictors:
        logger.info("%s: layers that predict several tokens are not loaded: %s", path, listed(predictors))
    unknown = [name for name in unexpected if name not in set(predictors) and not _is_harmless(name, config)]
    if unknown:
        raise ConfigError(
            f"model {path!r} has weights for which {type_name(config)} has no place: {listed(unknown)}"
        )


def check_places(
    path: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], config: Any
) -> None:
    """Raises what :func:`check_report` does, from the names and shapes of files and those of a model."""
    wrong = [
        f"{name} is {list(found[name])}, its configuration says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        raise ConfigError(f"model {path!r} cannot be loaded: weights are of another shape: {listed(wrong)}")
    report = {"missing_keys": set(expected) - set(found), "unexpected_keys": set(found) - set(expected)}
    check_report(path, report, config)


def check_finite(path: str, model: PreTrainedModel) -> None:
    """Raises ConfigError that names the first weight of a library's model with a NaN or an infinity."""
    from torch.distributed.tensor import DTensor

    for name, tensor in model.state_dict().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            check_weight(path, name, local)


def check_weight(path: str, name: str, weight: torch.Tensor) -> None:
    """Raises ConfigError for a weight with a NaN or an infinity.

    One pass without a copy, since NaN is a minimum and a maximum.
    """
    if weight.numel() and not bool(torch.stack(torch.aminmax(weight)).isfinite().all()):
        raise ConfigError(f"model {path!r}: the weight {name!r} holds NaN or infinite values")


def listed(names: Iterable[object]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(str(name) for name in names)
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return ", ".join(ordered[:_MAX_LISTED]) + more


def type_name(config: Any) -> str:
    return f"model type {config.model_type!r}"


def _is_harmless(name: str, config: Any) -> bool:
    if COMPUTED.search(name) or _OTHER_MODALITY.search(name):
        return True
    return bool(config.tie_word_embeddings) and name.endswith("lm_head.weight")


def _is_predictor(name: str, config: Any) -> bool:
    """True for a tensor of a layer after the last one, which predicts further tokens (MTP)."""
    if PREDICTOR.search(name):
        return True
    count = getattr(config, "num_nextn_predict_layers", None) or getattr(
        config, "mtp_num_hidden_layers", None
    )
    match = _LAYER.search(name)
    if match is None or not count:
        return False
    first = int(config.num_hidden_layers)
    return first <= int(match[2]) < first + int(count)
