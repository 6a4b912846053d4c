"""Refuses requests that no engine could run, even if the Ingress let them through."""

from __future__ import annotations

from collections.abc import Sequence

from specray.engine_info import EngineInfo
from specray.errors import EngineLostError, InvalidRequestError
from specray.request_options import OPTIONS
from specray.requests import ADAPTER_DIGEST_BYTES, GenerateRequest, SpeculationParams
from specray.types import ADAPTER, DraftKind, SamplingParams


def check_request(
    request: GenerateRequest, info: EngineInfo, *, has_stop_strings: bool, has_draft_model: bool
) -> None:
    """Refuses a request that the target cannot serve.

    Raises:
        InvalidRequestError: names the field, its value and the allowed range.
    """
    prompt, max_tokens = request.prompt_token_ids, request.max_tokens
    if not request.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if not prompt:
        raise InvalidRequestError("prompt is empty; at least 1 token is needed", field="prompt")
    _check_token_ids("prompt", prompt, info)
    if max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {max_tokens}; allowed: at least 1", field="max_tokens")
    num_tokens = len(prompt) + max_tokens
    if num_tokens > info.max_model_len:
        raise InvalidRequestError(
            f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} are {num_tokens} tokens;"
            f" allowed: {info.max_model_len} together",
            field="max_tokens",
        )
    if info.num_blocks and num_tokens > info.num_blocks * info.block_size:
        raise InvalidRequestError(
            f"{num_tokens} tokens do not fit the cache of {info.num_blocks * info.block_size} tokens",
            field="max_tokens",
        )
    _check_adapter(request, info)
    _check_resumed(request, info)
    _check_prediction(request, info)
    ranged = {
        "timeout_s": request.timeout_s,
        "num_speculative_tokens": request.speculation.num_speculative_tokens,
    }
    for name, value in ranged.items():
        allowed = OPTIONS[name].allowed
        if value is not None and allowed is not None and not allowed.contains(value):
            raise InvalidRequestError(f"{name} is {value}; allowed: {allowed}", field=name)
    if request.speculation.draft is DraftKind.MODEL and not has_draft_model:
        raise InvalidRequestError(
            "draft is 'model', but this service has no draft model; allowed: ngram, suffix, lookahead",
            field="draft",
        )
    if request.speculation.draft is DraftKind.FEATURES and not info.drafter:
        raise InvalidRequestError(
            "draft is 'features', but the target has no drafter; allowed: "
            f"{'model, ' if has_draft_model else ''}ngram, suffix, lookahead",
            field="draft",
        )
    if request.stop and not has_stop_strings:
        raise InvalidRequestError("stop strings are not supported by this service", field="stop")


def _check_adapter(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuses an adapter where the target knows none: its answer would be the base's."""
    ref = request.adapter
    if (b"" if ref is None else ref.digest) != request.sampling.adapter:
        raise InvalidRequestError("adapter and sampling name different adapters", field=ADAPTER)
    if ref is None:
        return
    if len(ref.digest) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequestError(
            f"adapter {ref.name!r} has a digest of {len(ref.digest)} bytes; allowed: {ADAPTER_DIGEST_BYTES}",
            field=ADAPTER,
        )
    if info.max_adapters == 0:
        raise InvalidRequestError(
            f"adapter {ref.name!r} cannot be used: this target knows no adapters; allowed: the base",
            field=ADAPTER,
        )


def _check_resumed(request: GenerateRequest, info: EngineInfo) -> None:
    if request.resumed is None:
        return
    if request.resumed.checkpoint != info.checkpoint:
        raise EngineLostError("another target serves now; the request may be sent again")
    token_ids = request.resumed.token_ids
    if not 1 <= len(token_ids) <= request.max_tokens:
        raise InvalidRequestError(
            f"resumed has {len(token_ids)} tokens; allowed: 1..{request.max_tokens}, which is max_tokens",
            field="resumed",
        )
    _check_token_ids("resumed", token_ids, info)


def _check_prediction(request: GenerateRequest, info: EngineInfo) -> None:
    token_ids = request.speculation.prediction
    if len(token_ids) > info.max_model_len:
        raise InvalidRequestError(
            f"prediction has {len(token_ids)} tokens; allowed: at most {info.max_model_len}",
            field="prediction",
        )
    _check_token_ids("prediction", token_ids, info)


def _check_token_ids(field: str, token_ids: Sequence[int], info: EngineInfo) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < info.vocab_size)
        raise InvalidRequestError(
            f"{field} holds token id {wrong}; allowed: 0..{info.vocab_size - 1}", field=field
        )


def probe_request(request_id: str) -> GenerateRequest:
    """The least that takes a real step of the target: one token, greedy, without speculation."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=(0,),
        sampling=SamplingParams(temperature=0.0, num_prompt_tokens=1),
        max_tokens=1,
        speculation=SpeculationParams(enabled=False),
    )
