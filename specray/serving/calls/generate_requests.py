"""Makes the routers' requests of a call: one for each prompt and choice."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Final

from specray.request_options import OPTIONS
from specray.requests import GenerateRequest, ServiceLevel, SpeculationParams
from specray.serving.validation import GenerationOptions, Limits, check_options, check_prompts
from specray.types import ADAPTER, SamplingParams

_UINT64: Final = (1 << 64) - 1
# Below these, float32 on the way to the engine or in its softmax would make them zero or infinite; the
# output is the same as with the smaller value.
_ADJUSTED: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType(
    {
        "temperature": lambda value: value if value >= 1e-5 else 0.0,
        "top_k": lambda value: max(value, 0),
        "top_p": lambda value: max(value, 1e-6),
    }
)
"""Functions, by the option's name, from a value that may be asked for to the value that engines get."""
_SHARED: Final = tuple(
    each.name for each in fields(SamplingParams) if each.name in OPTIONS and each.name != ADAPTER
)
"""Names of options that engines get under the same name and as they are."""


def truncated(
    prompts: Sequence[tuple[int, ...]], options: GenerationOptions, limits: Limits
) -> list[tuple[int, ...]]:
    """Returns the ends of the prompts that ``truncate_prompt_tokens`` keeps."""
    most = options.truncate_prompt_tokens
    if most is None:
        return list(prompts)
    if most == -1:
        most = max(1, limits.max_model_len - (options.max_tokens or 1))
    return [token_ids[-most:] for token_ids in prompts]


def to_generate_requests(
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    *,
    limits: Limits,
    request_id: str,
    draw_seed: Callable[[], int] | None = None,
) -> list[GenerateRequest]:
    """Makes one request per prompt and choice, the choices of the first prompt first.

    Choice 0 uses the given seed itself, so that ``n`` changes nothing for it. Without a seed each prompt
    draws its own: with a common one, equal prompts would get equal outputs.

    Args:
        request_id: prefix of the requests' ids; unique.
        draw_seed: returns 64 random bits, for each prompt of a call without a seed; default: the system's
            generator.

    Raises:
        InvalidRequestError: an option or a prompt is out of range.
    """
    check_options(options, limits)
    check_prompts(prompts, options, limits)
    draw = draw_seed or _random_seed
    seeds = [draw() if options.seed is None else options.seed for _ in prompts]
    return [
        _generate_request(
            f"{request_id}-{index}-{choice}", token_ids, mix_seed(seed, choice), options, limits
        )
        for index, (token_ids, seed) in enumerate(zip(prompts, seeds, strict=True))
        for choice in range(options.n or 1)
    ]


def mix_seed(seed: int, choice: int) -> int:
    """Returns the 64-bit seed of a choice: the seed itself for 0, else splitmix64 (Steele et al., 2014)."""
    if choice == 0:
        return seed & _UINT64
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64
    return mixed ^ (mixed >> 31)


def _generate_request(
    request_id: str, token_ids: tuple[int, ...], seed: int, options: GenerationOptions, limits: Limits
) -> GenerateRequest:
    eos_token_ids = () if options.ignore_eos else limits.eos_token_ids
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=_sampling_params(options, limits, seed=seed, num_prompt_tokens=len(token_ids)),
        max_tokens=_max_tokens(options, limits.max_model_len - len(token_ids)),
        stop=options.stop,
        eos_token_ids=eos_token_ids,
        speculation=SpeculationParams(
            enabled=options.speculation_enabled is not False,
            num_speculative_tokens=options.num_speculative_tokens,
            draft=options.draft,
            tenant=options.tenant,
            prediction=options.prediction_ids,
            reports_rounds=options.reports_rounds,
        ),
        priority=options.priority or 0,
        timeout_s=options.timeout_s,
        text=options.text,
        level=_level(options) or limits.level,
        session=options.prompt_cache_key,
        adapter=options.adapter_ref,
    )


def _level(options: GenerationOptions) -> ServiceLevel | None:
    if options.ttft_ms is None and options.itl_ms is None:
        return None
    return ServiceLevel(options.ttft_ms, options.itl_ms)


def _sampling_params(
    options: GenerationOptions, limits: Limits, *, seed: int, num_prompt_tokens: int
) -> SamplingParams:
    eos_token_ids = () if options.ignore_eos else limits.eos_token_ids
    values = {name: value for name in _SHARED if (value := getattr(options, name)) is not None}
    for name, adjust in _ADJUSTED.items():
        if name in values:
            values[name] = adjust(values[name])
    values |= {
        "seed": seed,
        "stop_token_ids": tuple(sorted({*eos_token_ids, *options.stop_token_ids})),
        "num_prompt_tokens": num_prompt_tokens,
        "num_logprobs": options.logprobs,
        "num_prompt_logprobs": options.prompt_logprobs,
        "verification": options.verification or limits.verification,
        "bad_words": options.bad_word_ids,
        "message_borders": tuple(
            sorted({num_prompt_tokens - tail for tail in options.message_tails if tail < num_prompt_tokens})
        ),
        "adapter": b"" if options.adapter_ref is None else options.adapter_ref.digest,
    }
    return SamplingParams(**values)


def _max_tokens(options: GenerationOptions, room: int) -> int:
    if options.max_tokens is not None:
        return min(options.max_tokens, room)
    return room if options.default_max_tokens is None else min(options.default_max_tokens, room)


def _random_seed() -> int:
    return secrets.randbits(64)
