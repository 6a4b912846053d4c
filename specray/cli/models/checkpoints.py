"""Finds the checkpoint for what a user calls a model, and what is served without being asked."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specray.config import MODEL_FREE_DRAFTS, NO_CHECKPOINTS, REMOTE_FEATURES
from specray.environment import external_ray_address
from specray.errors import ConfigError
from specray.models.cache import KeptCheckpoint, user_cache
from specray.models.catalogue import DEFAULT_MODEL, DRAFT_WITHOUT_OWN, KnownModel
from specray.models.conversion import convert
from specray.models.drafts import compact_draft, complete_draft
from specray.models.fetch import fetch_together, plain_directory
from specray.models.machine import has_int8_kernels, has_nvidia_gpu
from specray.models.resolve import Source, find_source, source_checkpoint, source_file

AUTO = "auto"
"""Target that is the default model, or the embedded pair where that cannot be had."""

Values = dict[str, Any]


def choose_target(values: Values) -> None:
    """Makes ``auto`` the target of a configuration that names none, for ``specray serve``.

    The embedded pair stays where the draft is a model that is named, which fits no other target, and in a
    cluster that is joined, whose other machines have no such cache.
    """
    target, draft = section(values, "target"), section(values, "draft")
    has_draft_model = draft.get("enabled", True) and draft.get("model") not in (
        None,
        REMOTE_FEATURES,
        *MODEL_FREE_DRAFTS,
    )
    if "model" not in target and not has_draft_model and external_ray_address() is None:
        target["model"] = AUTO


def choose_draft(values: Values) -> bool:
    """Gives a known target its draft where none is named. Returns whether it has.

    The package's draft stands in until it is completed, and another known model until it is fetched, so that
    keys of `draft` are validated for a model.
    """
    target, draft = section(values, "target"), section(values, "draft")
    known = DEFAULT_MODEL if target.get("model") == AUTO else _source(target)
    is_chosen = "model" in draft or draft.get("pool") is not None
    if not isinstance(known, KnownModel) or is_chosen or not draft.get("enabled", True):
        return False
    own = compact_draft(known)
    other = DRAFT_WITHOUT_OWN if known.draft is None else known.draft.name
    draft["model"] = other if own is None else str(own)
    return True


def use_checkpoints(values: Values, *, has_chosen_draft: bool) -> None:
    """Puts checkpoints in the place of known models and GGUF files, fetched and converted where need be.

    Args:
        has_chosen_draft: the draft is the choice of :func:`choose_draft`, which goes with its target.

    Raises:
        ConfigError: a model that is asked for cannot be had.
    """
    target, draft = section(values, "target"), section(values, "draft")
    _fetch_pair(target, draft, has_chosen_draft=has_chosen_draft)
    if target.get("model") == AUTO:
        kept = _default_checkpoint()
        if kept is None:
            del target["model"]
            if has_chosen_draft:
                del draft["model"]
        else:
            target["model"] = str(kept.directory)
            _name(values, DEFAULT_MODEL.name)
            if has_chosen_draft:
                _use_draft_of(DEFAULT_MODEL, kept, draft)
    elif (source := _source(target)) is not None:
        kept = fetched_checkpoint(source)
        target["model"] = str(kept.directory)
        _name(values, source.name)
        if has_chosen_draft and isinstance(source, KnownModel):
            _use_draft_of(source, kept, draft)
    if draft.get("enabled", True) and (source := _source(draft)) is not None:
        draft["model"] = str(fetched_checkpoint(source).directory)


def section(values: Values, name: str) -> Values:
    """A section of a configuration that is not validated yet; made where there is none."""
    found = values.get(name)
    if found is None:
        found = values[name] = {}
    return found if isinstance(found, dict) else {}


def _name(values: Values, name: str) -> None:
    """Names the served model, unless its user has, as each of several models is named."""
    if "name" not in values and values.get("served_model_name") is None:
        values["served_model_name"] = name


def _source(engine: Values) -> Source | None:
    model = engine.get("model")
    if not isinstance(model, str) or model in (AUTO, *NO_CHECKPOINTS):
        return None
    return find_source(model)


def _fetch_pair(target: Values, draft: Values, *, has_chosen_draft: bool) -> None:
    """Fetches a pair of known models at once. Raises ConfigError: one that is asked for cannot be had."""
    sources = [_source(engine) for engine in (target, draft) if engine.get("enabled", True)]
    try:
        fetch_sources(sources)
    except ConfigError:
        # A draft that nobody asked for can be done without.
        if not (
            has_chosen_draft
            and isinstance(sources[0], KnownModel)
            and user_cache().gguf(sources[0].sha256).is_file()
        ):
            raise


def _default_checkpoint() -> KeptCheckpoint | None:
    """The default model's checkpoint; None, after a line that says why: it cannot be had."""
    try:
        return fetched_checkpoint(DEFAULT_MODEL)
    except ConfigError as error:
        line = f"specray: {error}; serving the embedded pair in place of {DEFAULT_MODEL.name}"
        print(line, file=sys.stderr, flush=True)
        return None


def _use_draft_of(known: KnownModel, target: KeptCheckpoint, draft: Values) -> None:
    """Lets a known model's draft serve; the package's own in int8, where it is quicker and nobody objects.

    No output depends on the draft's weights, and on a processor a step of it takes as long as reading them.
    """
    draft["model"] = draft_of(known, target)
    if compact_draft(known) is None:
        return
    formats = ("quantization", "lm_head_quantization")
    is_free = draft.get("forward") != "hf" and not any(name in draft for name in formats)
    if draft["model"] != DRAFT_WITHOUT_OWN and is_free and _runs_here(draft) and has_int8_kernels():
        draft.update(dict.fromkeys(formats, "int8"))


def _runs_here(draft: Values) -> bool:
    """Whether a draft runs on a processor of this machine, as far as can be told before Ray starts."""
    asked = draft.get("ray_actor_options") or {}
    on_processor = draft.get("device") == "cpu" or not (draft.get("device") == "cuda" or has_nvidia_gpu())
    return on_processor and not asked.get("num_gpus") and external_ray_address() is None


def draft_of(known: KnownModel, target: KeptCheckpoint) -> str:
    """What drafts for a known model: the package's own draft, another known model, or none of both."""
    if compact_draft(known) is None and known.draft is None:
        return DRAFT_WITHOUT_OWN
    from specray.cli.models.fetching import fetch_listener

    try:
        if known.draft is not None:
            return str(fetched_checkpoint(known.draft).directory)
        with fetch_listener() as listener:
            return str(complete_draft(known, target, user_cache(), listener))
    except ConfigError as error:
        print(f"specray: {error}; drafting by {DRAFT_WITHOUT_OWN}", file=sys.stderr, flush=True)
        return DRAFT_WITHOUT_OWN


def local_checkpoint(model: str) -> str:
    """A model as engines take it: the directory of a known model or GGUF file, else what was given."""
    source = find_source(model)
    return model if source is None else str(fetched_checkpoint(source).directory)


def plain_checkpoint(source: Source) -> Path:
    """A source as a bfloat16 checkpoint in safetensors in the cache, for training. Raises ConfigError."""
    from specray.cli.models.fetching import fetch_listener

    with fetch_listener() as listener:
        kept = source_checkpoint(source, user_cache(), listener)
        return plain_directory(kept, user_cache(), listener)


def write_plain(source: Source, directory: Path) -> None:
    """Writes a source as a bfloat16 checkpoint in safetensors. Raises ConfigError where that cannot be."""
    from specray.cli.models.fetching import fetch_listener

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (
            fetch_listener() as listener,
            tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as work,
        ):
            written = Path(work) / "checkpoint"
            file = source_file(source, user_cache(), listener)
            convert(file, written, Path(work) / "converter", listener, f"converting {source.name}")
            written.rename(directory)
    except OSError as error:
        raise ConfigError(
            f"directory {str(directory)!r} cannot be written: {error.strerror or error}"
        ) from None


def fetch_sources(sources: Sequence[Source | None]) -> None:
    """Fetches known models ahead, where several are missing: at once, under one bar. Raises ConfigError."""
    from specray.cli.models.fetching import fetch_listener

    known = [source for source in sources if isinstance(source, KnownModel)]
    with fetch_listener() as listener:
        fetch_together(known, user_cache(), listener)


def fetched_checkpoint(source: Source) -> KeptCheckpoint:
    """A source's checkpoint; stderr shows how it is made. Raises ConfigError where it cannot be had."""
    from specray.cli.models.fetching import fetch_listener

    with fetch_listener() as listener:
        return source_checkpoint(source, user_cache(), listener)
