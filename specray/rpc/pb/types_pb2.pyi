from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verification(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_UNSPECIFIED: _ClassVar[Verification]
    VERIFICATION_COUPLED: _ClassVar[Verification]
    VERIFICATION_REJECTION: _ClassVar[Verification]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
VERIFICATION_UNSPECIFIED: Verification
VERIFICATION_COUPLED: Verification
VERIFICATION_REJECTION: Verification
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "min_tokens", "stop_token_ids", "num_prompt_tokens", "num_logprobs", "verification", "grammar", "allowed_token_ids", "bad_words", "cache_salt", "num_prompt_logprobs", "adapter", "message_borders")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BORDERS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_logprobs: int
    verification: Verification
    grammar: Grammar
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    cache_salt: str
    num_prompt_logprobs: int
    adapter: bytes
    message_borders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., num_prompt_logprobs: _Optional[int] = ..., adapter: _Optional[bytes] = ..., message_borders: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    source: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., source: _Optional[str] = ...) -> None: ...

class SparseProbs(_message.Message):
    __slots__ = ("token_ids", "probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class UnknownSequence(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ...) -> None: ...

class ItemFailed(_message.Message):
    __slots__ = ("request_id", "round_id", "base_len", "message", "is_retriable", "is_invalid", "field")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    IS_INVALID_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    round_id: int
    base_len: int
    message: str
    is_retriable: bool
    is_invalid: bool
    field: str
    def __init__(self, request_id: _Optional[str] = ..., round_id: _Optional[int] = ..., base_len: _Optional[int] = ..., message: _Optional[str] = ..., is_retriable: _Optional[bool] = ..., is_invalid: _Optional[bool] = ..., field: _Optional[str] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("num_rows", "seconds", "num_experts")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    seconds: float
    num_experts: int
    def __init__(self, num_rows: _Optional[int] = ..., seconds: _Optional[float] = ..., num_experts: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("num_experts", "num_chosen", "share")
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    num_experts: int
    num_chosen: int
    share: float
    def __init__(self, num_experts: _Optional[int] = ..., num_chosen: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class GrammarStats(_message.Message):
    __slots__ = ("compile_s", "mask_s", "num_compiled", "num_cache_hits", "num_illegal_drafts")
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    MASK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_ILLEGAL_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    compile_s: float
    mask_s: float
    num_compiled: int
    num_cache_hits: int
    num_illegal_drafts: int
    def __init__(self, compile_s: _Optional[float] = ..., mask_s: _Optional[float] = ..., num_compiled: _Optional[int] = ..., num_cache_hits: _Optional[int] = ..., num_illegal_drafts: _Optional[int] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("role", "model", "vocab_size", "tokenizer_fingerprint", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "protocol_version", "dtype", "tensor_parallel_size", "num_blocks_in_use", "num_prefix_cache_queries", "num_prefix_cache_hits", "step_times", "num_routers", "busy_share", "context_token_s", "grammar", "drafter", "feature_drafter", "feature_size", "experts", "adapters", "max_adapters", "is_deterministic", "isa", "checkpoint", "hardware", "lacks_outcomes", "max_adapter_rank", "adapter_names", "num_snapshots", "num_snapshots_held", "num_snapshots_evicted", "context_row_share")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    LACKS_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ROW_SHARE_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    vocab_size: int
    tokenizer_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    protocol_version: int
    dtype: str
    tensor_parallel_size: int
    num_blocks_in_use: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    num_routers: int
    busy_share: float
    context_token_s: float
    grammar: GrammarStats
    drafter: str
    feature_drafter: str
    feature_size: int
    experts: RoutedExperts
    adapters: _containers.RepeatedScalarFieldContainer[bytes]
    max_adapters: int
    is_deterministic: bool
    isa: str
    checkpoint: str
    hardware: _containers.RepeatedScalarFieldContainer[str]
    lacks_outcomes: bool
    max_adapter_rank: int
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    num_snapshots: int
    num_snapshots_held: int
    num_snapshots_evicted: int
    context_row_share: float
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., protocol_version: _Optional[int] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., num_blocks_in_use: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., num_routers: _Optional[int] = ..., busy_share: _Optional[float] = ..., context_token_s: _Optional[float] = ..., grammar: _Optional[_Union[GrammarStats, _Mapping]] = ..., drafter: _Optional[str] = ..., feature_drafter: _Optional[str] = ..., feature_size: _Optional[int] = ..., experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., adapters: _Optional[_Iterable[bytes]] = ..., max_adapters: _Optional[int] = ..., is_deterministic: _Optional[bool] = ..., isa: _Optional[str] = ..., checkpoint: _Optional[str] = ..., hardware: _Optional[_Iterable[str]] = ..., lacks_outcomes: _Optional[bool] = ..., max_adapter_rank: _Optional[int] = ..., adapter_names: _Optional[_Iterable[str]] = ..., num_snapshots: _Optional[int] = ..., num_snapshots_held: _Optional[int] = ..., num_snapshots_evicted: _Optional[int] = ..., context_row_share: _Optional[float] = ...) -> None: ...

class FeatureRows(_message.Message):
    __slots__ = ("first", "num_rows", "data")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_rows: int
    data: bytes
    def __init__(self, first: _Optional[int] = ..., num_rows: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class TreeBudget(_message.Message):
    __slots__ = ("num_nodes", "widths", "min_chance")
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    MIN_CHANCE_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    widths: _containers.RepeatedScalarFieldContainer[int]
    min_chance: float
    def __init__(self, num_nodes: _Optional[int] = ..., widths: _Optional[_Iterable[int]] = ..., min_chance: _Optional[float] = ...) -> None: ...
