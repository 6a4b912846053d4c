"""Configuration of a service, with one module per part."""

from specray.config.access import AuthConfig, KeyConfig, KeySpeculationConfig, RpcConfig, TlsConfig
from specray.config.adapters import AdaptersConfig
from specray.config.endpoints import (
    ChatConfig,
    GrpcConfig,
    HttpConfig,
    IngressConfig,
    LoggingConfig,
    TelemetryConfig,
)
from specray.config.engine import (
    AUTO_WEIGHTS,
    EMBEDDED,
    MODEL_FREE_DRAFTS,
    MTP,
    NO_CHECKPOINTS,
    RANK_OPTIONS,
    REMOTE_FEATURES,
    DraftConfig,
    Dtype,
    EngineConfig,
    PrefixCache,
    TargetConfig,
)
from specray.config.models import LoadingConfig, ModelConfig, PoolConfig
from specray.config.router import RouterConfig
from specray.config.scaling import DraftScalingConfig, RouterScalingConfig, ScalingConfig
from specray.config.section import Section
from specray.config.service import (
    Config,
    load_config,
    pairs,
    parse_config,
    prefer_drafter,
    read_config_file,
)
from specray.config.speculation import SpeculationConfig

__all__ = [
    "AUTO_WEIGHTS",
    "EMBEDDED",
    "MODEL_FREE_DRAFTS",
    "MTP",
    "NO_CHECKPOINTS",
    "RANK_OPTIONS",
    "REMOTE_FEATURES",
    "AdaptersConfig",
    "AuthConfig",
    "ChatConfig",
    "Config",
    "DraftConfig",
    "DraftScalingConfig",
    "Dtype",
    "EngineConfig",
    "GrpcConfig",
    "HttpConfig",
    "IngressConfig",
    "KeyConfig",
    "KeySpeculationConfig",
    "LoadingConfig",
    "LoggingConfig",
    "ModelConfig",
    "PoolConfig",
    "PrefixCache",
    "RouterConfig",
    "RouterScalingConfig",
    "RpcConfig",
    "ScalingConfig",
    "Section",
    "SpeculationConfig",
    "TargetConfig",
    "TelemetryConfig",
    "TlsConfig",
    "load_config",
    "pairs",
    "parse_config",
    "prefer_drafter",
    "read_config_file",
]
