from specray.rpc.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyItem(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "token_ids", "draft_token_ids", "draft_probs", "sample", "sampling", "max_new_tokens", "draft_parents", "lookahead", "num_next_draft_tokens", "next_min_acceptance", "next_tree", "num_features", "first_feature", "runs_on")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TREE_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FEATURE_FIELD_NUMBER: _ClassVar[int]
    RUNS_ON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseProbs]
    sample: bool
    sampling: _types_pb2.SamplingParams
    max_new_tokens: int
    draft_parents: _containers.RepeatedScalarFieldContainer[int]
    lookahead: LookaheadBudget
    num_next_draft_tokens: int
    next_min_acceptance: float
    next_tree: _types_pb2.TreeBudget
    num_features: int
    first_feature: int
    runs_on: bool
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseProbs, _Mapping]]] = ..., sample: _Optional[bool] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., draft_parents: _Optional[_Iterable[int]] = ..., lookahead: _Optional[_Union[LookaheadBudget, _Mapping]] = ..., num_next_draft_tokens: _Optional[int] = ..., next_min_acceptance: _Optional[float] = ..., next_tree: _Optional[_Union[_types_pb2.TreeBudget, _Mapping]] = ..., num_features: _Optional[int] = ..., first_feature: _Optional[int] = ..., runs_on: _Optional[bool] = ...) -> None: ...

class LookaheadBudget(_message.Message):
    __slots__ = ("width", "ngram_len", "num_guesses")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NGRAM_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_GUESSES_FIELD_NUMBER: _ClassVar[int]
    width: int
    ngram_len: int
    num_guesses: int
    def __init__(self, width: _Optional[int] = ..., ngram_len: _Optional[int] = ..., num_guesses: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("items", "release_request_ids")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    release_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ..., release_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "num_accepted_tokens", "next_token_id", "logprobs", "held_len", "num_cached_tokens", "prompt_logprobs", "last_accepted_node", "draft_token_ids", "draft_parents", "draft_probs", "features")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HELD_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LAST_ACCEPTED_NODE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    num_accepted_tokens: int
    next_token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    held_len: int
    num_cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    last_accepted_node: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseProbs]
    features: _types_pb2.FeatureRows
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., next_token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., held_len: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., last_accepted_node: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_parents: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseProbs, _Mapping]]] = ..., features: _Optional[_Union[_types_pb2.FeatureRows, _Mapping]] = ...) -> None: ...

class TargetReply(_message.Message):
    __slots__ = ("verdict", "unknown_sequence", "item_failed")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ITEM_FAILED_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    unknown_sequence: _types_pb2.UnknownSequence
    item_failed: _types_pb2.ItemFailed
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., unknown_sequence: _Optional[_Union[_types_pb2.UnknownSequence, _Mapping]] = ..., item_failed: _Optional[_Union[_types_pb2.ItemFailed, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("replies", "forward_ns", "num_rows", "num_experts")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[TargetReply]
    forward_ns: int
    num_rows: int
    num_experts: int
    def __init__(self, replies: _Optional[_Iterable[_Union[TargetReply, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_experts: _Optional[int] = ...) -> None: ...

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.EngineInfo
    def __init__(self, info: _Optional[_Union[_types_pb2.EngineInfo, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("folder", "digest")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    folder: str
    digest: bytes
    def __init__(self, folder: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
