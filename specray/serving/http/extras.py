"""Fields of the OpenAI API that this service does not have: ignores or refuses them.

A field that would change the output is refused unless its value asks for nothing. A field that cannot change
it is ignored. An unknown field is refused, since it may be a misspelt one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from specray.errors import InvalidRequestError
from specray.serving.validation import shown

HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    }
)

# Field -> values that ask for nothing; null never asks for anything.
_INERT: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
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
        "use_beam_search": (False,),
    }
)


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
    # In Python True equals 1, but best_of: true has the wrong type.
    if isinstance(value, bool) or not any(value == allowed for allowed in inert):
        if value is False and False in inert:
            return
        allowed = " or ".join(["absent", *(repr(entry) for entry in inert)])
        raise InvalidRequestError(
            f"{name} is {shown(value)}, which this service does not support; allowed: {allowed}", field=name
        )
