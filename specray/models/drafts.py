"""Drafts that the package brings for known models, completed with the target's embedding and kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specray.demo.paths import smollm2_draft_path
from specray.errors import ConfigError
from specray.models.cache import KeptCheckpoint, ModelCache
from specray.models.catalogue import SMOLLM2_135M_INSTRUCT, KnownModel
from specray.models.child import module_command, run_child
from specray.models.progress import Listener

_DEADLINE_S = 600.0
_KEY_CHARS = 12


def compact_draft(known: KnownModel) -> Path | None:
    """The package's draft for a known model, in its compact form; None: there is none."""
    return smollm2_draft_path() if known == SMOLLM2_135M_INSTRUCT else None


def complete_draft(known: KnownModel, target: KeptCheckpoint, cache: ModelCache, listener: Listener) -> Path:
    """The checkpoint of a known model's draft, made once for each target and version of the draft.

    It is made by a process of its own: this one needs no torch.

    Args:
        target: the model's verified checkpoint.

    Raises:
        ConfigError: there is no draft, or it cannot be completed; one sentence.
    """
    compact = compact_draft(known)
    if compact is None:
        raise ConfigError(f"there is no draft for {known.name}; allowed: ngram, or a path")
    # In the target's directory, so that it goes where that goes.
    destination = target.directory / f"draft-{_version(compact)}"
    if destination.is_dir():
        return destination
    with cache.locked(target.sha256, listener, known.name):
        if destination.is_dir():
            return destination
        what = f"completing the draft of {known.name}"
        listener.progress(what)
        with cache.work_directory(target.sha256) as work, cache.using():
            ended = run_child(
                module_command(
                    "specray.train.draft.completion", str(compact), str(target.directory), str(work / "draft")
                ),
                directory=work,
                environment={},
                deadline_s=_DEADLINE_S,
                tick=lambda: listener.progress(what),
            )
            if ended.returncode != 0:
                reason = (ended.errors.strip().splitlines() or ["no word of why"])[-1][:300]
                raise ConfigError(f"the draft of {known.name} cannot be completed: {reason}")
            (work / "draft").rename(destination)
    return destination


def _version(compact: Path) -> str:
    digest = hashlib.sha256((compact / "compact.safetensors").read_bytes())
    return digest.hexdigest()[:_KEY_CHARS]
