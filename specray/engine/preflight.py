"""Checks a model's files and configuration before its weights are loaded, so that a bad start fails early."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from specray.config import MTP, Config, DraftConfig, EngineConfig, TargetConfig
from specray.engine.model.checkpoint.headers import weight_files
from specray.engine.model.checkpoint.vocabulary import stored_head
from specray.engine.model.description import ModelArgs, ModelDescription, describe, model_path
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.window import with_window
from specray.errors import ConfigError
from specray.tokenization.fingerprint import ModelVocabulary, tokenizer_vocabulary
from specray.tokenization.pair import difference, pair_problem
from specray.types import DraftKind


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The part of a model's description that draft and target must know of each other."""

    path: str
    vocab_size: int
    """Token ids of the model: those of its tokenizer, and maybe more, which pad its weights."""
    vocabulary: ModelVocabulary
    has_recurrent_layers: bool = False


def check_model(config: EngineConfig, role: str) -> ModelSummary:
    """Reads configuration and tokenizer.

    Raises:
        ConfigError: a file is missing, the architecture is not supported, its layers cannot be shared by so
            many ranks, or a limit is beyond the model's.
    """
    path = model_path(config, role)
    args = ModelArgs(
        path=path,
        max_model_len=with_window(config).max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        role=role,
        forward=config.forward,
        formats=WeightFormats.of(config),
        vocabulary_ids=config.vocabulary_ids if isinstance(config, DraftConfig) else None,
        adapter=config.adapter if isinstance(config, TargetConfig) else None,
    )
    try:
        described = describe(args)
    except ConfigError as error:
        if args.max_model_len == config.max_model_len:
            raise
        raise ConfigError(
            f"draft.window leads to sequences of {args.max_model_len} tokens: {error}"
        ) from None
    _check_stored_ids(path, described)
    vocabulary = tokenizer_vocabulary(path, described.directory)
    return ModelSummary(path, described.vocab_size, vocabulary, described.has_recurrent_layers)


def _check_stored_ids(path: str, described: ModelDescription) -> None:
    decoder, directory = described.decoder, described.directory
    if decoder is None or decoder.draft_vocab_size is None or directory is None:
        return
    entry = None if described.library is None else described.library.weights_entry
    if all(file.is_file() for file in weight_files(directory, entry)):
        stored_head(path, directory, num_rows=decoder.num_logits, vocab_size=decoder.vocab_size, entry=entry)


def _check_inner(draft: EngineConfig, checked: ModelSummary) -> None:
    """Raises ConfigError where the draft's own draft is none, or speaks of other tokens."""
    inner = draft.inner_model if isinstance(draft, DraftConfig) else None
    if inner is None:
        return
    found = check_model(inner, "draft")
    problem = difference(found.vocabulary, checked.vocabulary)
    if problem is not None:
        raise ConfigError(
            f"draft.draft: {found.path} has another tokenizer than the draft {checked.path}: {problem}; "
            "allowed: the same vocabulary"
        )


def _check_drafter(target: EngineConfig) -> None:
    """Raises ConfigError for a drafter that is not there; only the engine opens its tensors."""
    path = target.drafter if isinstance(target, TargetConfig) else None
    if path is not None and path != MTP and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"target.drafter is {path!r}; allowed: a directory with config.json and tensors")


def check_tree(config: Config, role: str) -> None:
    """Raises ConfigError for trees where draft or target, by ``role``, has recurrent layers.

    Their state is one for all tokens before, so rows of two branches cannot go on from it side by side.
    """
    if config.speculation.tree != "off":
        engine, verb = (config.draft, "draft") if role == "draft" else (config.target, "verify")
        raise ConfigError(
            f"speculation.tree is {config.speculation.tree!r} and {role}.model {engine.model!r} has "
            f"recurrent layers, which {verb} chains alone; allowed: 'off'"
        )


def check_chains(config: Config) -> None:
    """Raises ConfigError for what is not served with a target that has recurrent layers.

    They verify chains alone (:func:`check_tree`).
    """
    check_tree(config, "target")
    if config.draft.enabled and config.draft.model == DraftKind.LOOKAHEAD:
        raise ConfigError(
            f"draft.model is 'lookahead' and target.model {config.target.model!r} has recurrent layers, "
            "which verify chains alone; allowed: a model, 'ngram' or 'suffix'"
        )


def check_models(config: Config) -> None:
    """Checks the models of a service, and that each target can verify what is drafted.

    Raises:
        ConfigError: as :func:`check_pair` and :func:`check_chains`; of several models, with its name.
    """
    if config.models:
        _check_several(config)
        return
    has_checkpoint = config.draft.has_model and not config.draft.reads_features
    target, draft = check_pair(config.target, config.draft if has_checkpoint else None)
    if target.has_recurrent_layers:
        check_chains(config)
    if draft is not None and draft.has_recurrent_layers:
        check_tree(config, "draft")


def _check_several(config: Config) -> None:
    shared = Counter(model.draft.pool for model in config.models)
    for model in config.models:
        alone = config.of_model(model.name)
        if model.draft.pool is not None and shared[model.draft.pool] > 1:
            # A draft translates for the vocabulary of one target.
            draft = alone.draft.model_copy(update={"vocabulary": "same"})
            alone = alone.model_copy(update={"draft": draft})
        try:
            check_models(alone)
        except ConfigError as error:
            raise ConfigError(f"model {model.name!r}: {error}") from None


def check_pair(target: EngineConfig, draft: EngineConfig | None) -> tuple[ModelSummary, ModelSummary | None]:
    """Checks both models and that the draft can read the target's tokens.

    Returns:
        Target and draft.

    Raises:
        ConfigError: as :func:`check_model`, there is no such drafter, or the draft's tokenizer does not fit.
    """
    checked_target = check_model(target, "target")
    _check_drafter(target)
    if draft is None:
        return checked_target, None
    checked_draft = check_model(draft, "draft")
    _check_inner(draft, checked_draft)
    mode = draft.vocabulary if isinstance(draft, DraftConfig) else "same"
    problem = pair_problem(
        checked_draft.vocabulary,
        checked_target.vocabulary,
        mode,
        draft_path=checked_draft.path,
        target_path=checked_target.path,
    )
    if problem is not None:
        raise ConfigError(
            f"draft.model: {checked_draft.path} has another tokenizer than the target {checked_target.path}: "
            f"{problem}"
        )
    return checked_target, checked_draft
