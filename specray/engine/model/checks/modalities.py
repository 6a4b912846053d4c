"""The text part of multimodal models: which class of the library serves it, and what it can do without."""

from __future__ import annotations

import contextlib
import logging as stdlib_logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging

_TOKENS = (2, 3)
"""Tokens of a forward that tells whether a part is missed."""


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether the library has a decoder-only language model for a configuration, alone or among others."""
    return not config.is_encoder_decoder and (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or needs_other_parts(config)
    )


def needs_other_parts(config: PreTrainedConfig) -> bool:
    """Whether the library knows the language model as a part of a multimodal one only."""
    return (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and config.get_text_config() is not config
    )


def auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if needs_other_parts(config) else AutoModelForCausalLM


def is_text_alone(config: PreTrainedConfig) -> bool:
    """Whether the model that is loaded for a configuration is built from its text part."""
    text = config.get_text_config()
    if text is config:
        return True
    if needs_other_parts(config):
        return False
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[type(config)].config_class is type(text)


@torch.inference_mode()
def drop_other_parts(model: PreTrainedModel) -> None:
    """Takes away all but the language model, unless logits of text come from it."""
    untyped: Any = model
    whole: Any = model.base_model
    decoder = untyped.get_decoder()
    if decoder is whole:
        return
    tokens = torch.tensor([_TOKENS], device=model.device)
    expected = model(tokens, use_cache=False).logits
    for name, part in list(whole.named_children()):
        if any(module is decoder for module in part.modules()):
            continue
        setattr(whole, name, None)
        try:
            is_same = torch.equal(model(tokens, use_cache=False).logits, expected)
        except Exception:  # Whatever a forward raises that misses a part, as Gemma 3n's does.
            is_same = False
        if not is_same:
            setattr(whole, name, part)


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Without what the library logs of a model that nobody asked it for."""
    before = logging.get_verbosity()
    logging.set_verbosity(stdlib_logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
