from specray.rpc.pb import inference_pb2 as _inference_pb2
from specray.rpc.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeliverRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[OutputChunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[OutputChunk, _Mapping]]] = ...) -> None: ...

class RouterLoad(_message.Message):
    __slots__ = ("number", "num_waiting_tokens", "num_running", "num_places", "prefill_tokens_per_s", "step_s", "num_cache_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_waiting_tokens: int
    num_running: int
    num_places: int
    prefill_tokens_per_s: float
    step_s: float
    num_cache_tokens: int
    def __init__(self, number: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_places: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., num_cache_tokens: _Optional[int] = ...) -> None: ...

class OutputChunk(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish_reason", "stop_string", "stop_token_id", "stats", "num_cached_tokens", "ttft_s", "prompt_logprobs", "rounds", "load", "checkpoint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    finish_reason: _inference_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    stats: _inference_pb2.SpeculationStats
    num_cached_tokens: int
    ttft_s: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundReport]
    load: RouterLoad
    checkpoint: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., stats: _Optional[_Union[_inference_pb2.SpeculationStats, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundReport, _Mapping]]] = ..., load: _Optional[_Union[RouterLoad, _Mapping]] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class EngineStep(_message.Message):
    __slots__ = ("started_ms", "ended_ms", "forward_ms")
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    started_ms: float
    ended_ms: float
    forward_ms: float
    def __init__(self, started_ms: _Optional[float] = ..., ended_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("token_ids", "draft_token_ids", "num_accepted_tokens", "source", "lookup", "overlap", "num_speculative_tokens", "reason", "verify", "drafting", "draft_parents", "draft_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_tokens: int
    source: str
    lookup: str
    overlap: str
    num_speculative_tokens: int
    reason: str
    verify: EngineStep
    drafting: _containers.RepeatedCompositeFieldContainer[EngineStep]
    draft_parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., num_accepted_tokens: _Optional[int] = ..., source: _Optional[str] = ..., lookup: _Optional[str] = ..., overlap: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., verify: _Optional[_Union[EngineStep, _Mapping]] = ..., drafting: _Optional[_Iterable[_Union[EngineStep, _Mapping]]] = ..., draft_parents: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
