from specray.rpc.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculateItem(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "token_ids", "proposed_token_ids", "num_speculative_tokens", "fanout", "sampling", "max_branches", "min_acceptance", "tree", "features", "other_token_ids", "other_parents", "other_fanout")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FANOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    OTHER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OTHER_PARENTS_FIELD_NUMBER: _ClassVar[int]
    OTHER_FANOUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    proposed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_speculative_tokens: int
    fanout: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    max_branches: int
    min_acceptance: float
    tree: _types_pb2.TreeBudget
    features: _types_pb2.FeatureRows
    other_token_ids: _containers.RepeatedScalarFieldContainer[int]
    other_parents: _containers.RepeatedScalarFieldContainer[int]
    other_fanout: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., proposed_token_ids: _Optional[_Iterable[int]] = ..., num_speculative_tokens: _Optional[int] = ..., fanout: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_branches: _Optional[int] = ..., min_acceptance: _Optional[float] = ..., tree: _Optional[_Union[_types_pb2.TreeBudget, _Mapping]] = ..., features: _Optional[_Union[_types_pb2.FeatureRows, _Mapping]] = ..., other_token_ids: _Optional[_Iterable[int]] = ..., other_parents: _Optional[_Iterable[int]] = ..., other_fanout: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("items", "release_request_ids")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SpeculateItem]
    release_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[_Union[SpeculateItem, _Mapping]]] = ..., release_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "draft_token_ids", "draft_probs", "draft_parents")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseProbs]
    draft_parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseProbs, _Mapping]]] = ..., draft_parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("num_accepted_tokens", "next_token_id", "draft_token_ids", "draft_probs", "draft_parents", "last_accepted_node")
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ACCEPTED_NODE_FIELD_NUMBER: _ClassVar[int]
    num_accepted_tokens: int
    next_token_id: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseProbs]
    draft_parents: _containers.RepeatedScalarFieldContainer[int]
    last_accepted_node: int
    def __init__(self, num_accepted_tokens: _Optional[int] = ..., next_token_id: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseProbs, _Mapping]]] = ..., draft_parents: _Optional[_Iterable[int]] = ..., last_accepted_node: _Optional[int] = ...) -> None: ...

class Outcomes(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "branches")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("proposal", "outcomes", "unknown_sequence", "item_failed")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ITEM_FAILED_FIELD_NUMBER: _ClassVar[int]
    proposal: Proposal
    outcomes: Outcomes
    unknown_sequence: _types_pb2.UnknownSequence
    item_failed: _types_pb2.ItemFailed
    def __init__(self, proposal: _Optional[_Union[Proposal, _Mapping]] = ..., outcomes: _Optional[_Union[Outcomes, _Mapping]] = ..., unknown_sequence: _Optional[_Union[_types_pb2.UnknownSequence, _Mapping]] = ..., item_failed: _Optional[_Union[_types_pb2.ItemFailed, _Mapping]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("replies", "forward_ns", "is_draining")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    forward_ns: int
    is_draining: bool
    def __init__(self, replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., is_draining: _Optional[bool] = ...) -> None: ...

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.EngineInfo
    def __init__(self, info: _Optional[_Union[_types_pb2.EngineInfo, _Mapping]] = ...) -> None: ...
