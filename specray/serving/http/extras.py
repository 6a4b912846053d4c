"""Fields of OpenAI's API, and of other servers', that this service does not have: ignores or refuses them.

A field that would change the output is refused unless its value asks for nothing. A field that cannot change
it is ignored. An unknown field is refused, since it may be a misspelt one, unless the service ignores those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from specray.errors import InvalidRequestError, shown

HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        # vLLM's, SGLang's and llama.cpp's
        "cache_prompt",
        "guided_decoding_backend",
        "include_reasoning",
        "request_id",
        "rid",
        "separate_reasoning",
        "stream_reasoning",
        # Parameters of llama.cpp's samplers, without effect while the sampler is off.
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "repeat_last_n",
        "xtc_threshold",
    }
)
"""Fields that cannot change the output, or only together with one that is refused."""

# Field -> values that ask for nothing; null never asks for anything.
_INERT: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        # OpenAI
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "moderation": (),
        # vLLM
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "early_stopping": (False,),
        "echo": (False,),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        # SGLang
        "lora_path": ("",),
        "no_stop_trim": (False,),
        "return_hidden_states": (False,),
        "stop_regex": ("", []),
        # llama.cpp
        "dry_multiplier": (0,),
        "dynatemp_range": (0,),
        "id_slot": (-1,),
        "lora": ([],),
        "min_keep": (0,),
        "mirostat": (0,),
        "n_indent": (0,),
        "n_keep": (0,),
        "n_probs": (0,),
        "penalize_nl": (False,),
        "post_sampling_probs": (False,),
        "repeat_penalty": (1,),
        "return_progress": (False,),
        "return_tokens": (False,),
        "t_max_predict_ms": (0,),
        "tfs_z": (1,),
        "timings_per_token": (False,),
        "top_n_sigma": (-1,),
        "typ_p": (1,),
        "typical_p": (1,),
        "xtc_probability": (0,),
    }
)


def is_known(name: str) -> bool:
    """True for a field that this file knows."""
    return name in HARMLESS or name in _INERT or name == "best_of"


def check_extras(extras: Mapping[str, object], *, n: int) -> None:
    """Raises InvalidRequestError for the first field that would silently change the output.

    Args:
        extras: fields of the request that are not in its schema.
        n: outputs per prompt; ``best_of`` may only repeat it.
    """
    for name, value in extras.items():
        if value is None or name in HARMLESS:
            continue
        if name == "best_of":
            _check_inert(name, value, (n,))
        elif name in _INERT:
            _check_inert(name, value, _INERT[name])
        else:
            raise InvalidRequestError(f"{shown(name)} is not a field of this API", field=name[:100])


def _check_inert(name: str, value: object, inert: tuple[object, ...]) -> None:
    if any(_is_same(value, allowed) for allowed in inert):
        return
    allowed = " or ".join(["absent", *(json.dumps(entry) for entry in inert)])
    raise InvalidRequestError(
        f"{name} is {shown(value)}, which this service does not support; allowed: {allowed}", field=name
    )


def _is_same(value: object, other: object) -> bool:
    """Equal in JSON: 1 is 1.0, but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
