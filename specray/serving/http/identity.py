"""Identity of what is served: the model's entry in /v1/models, and the fingerprint of every answer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray import __version__
from specray.checkpoint_digest import WEIGHT_FILES, file_digest
from specray.config import EMBEDDED, Config
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.requests import AdapterRef, ServiceInfo


@dataclass(frozen=True, slots=True)
class Identity:
    """What this service is, the same in each of its replicas as long as they see the same files."""

    name: str
    """Name in the API."""
    root: str
    """Checkpoint of the target, as it is configured."""
    created: int
    """Seconds since 1970: time of the target's newest file; of this process's start if it has none here."""
    system_fingerprint: str
    """Changes with the version, the checkpoints and the settings on which outputs may depend."""

    def model(self, info: ServiceInfo | None, adapter: AdapterRef | None = None) -> dict[str, Any]:
        """Returns the model as an entry of /v1/models: vLLM's fields, and what outputs depend on.

        Args:
            info: what its Router says; None: it is not loaded.
            adapter: what changes its weights; None: nothing.
        """
        told = (
            {}
            if info is None
            else {
                "max_model_len": info.max_model_len,
                "checkpoint": info.checkpoint,
                "is_deterministic": info.is_deterministic,
                "isa": info.isa,
            }
        )
        return {
            "id": self.name if adapter is None else adapter.name,
            "object": "model",
            "created": self.created,
            "owned_by": "specray",
            "root": self.root if adapter is None else adapter.folder,
            "parent": None if adapter is None else self.name,
            "adapter": None if adapter is None else adapter.digest.hex(),
            **told,
            "permission": [self._permission()],
        }

    def _permission(self) -> dict[str, Any]:
        return {
            "id": f"modelperm-{hashlib.sha256(self.name.encode()).hexdigest()[:32]}",
            "object": "model_permission",
            "created": self.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }


def identify(config: Config, *, now: Callable[[], float] = time.time) -> Identity:
    """Reads the names, digests and times of the checkpoints' files.

    Args:
        now: returns seconds since 1970.
    """
    target = _files(config.target.model, demo_target_path())
    draft = _files(config.draft.model, demo_draft_path())
    times = [path.stat().st_mtime for path in target]
    sections = {
        name: getattr(config, name).model_dump(mode="json") for name in ("target", "draft", "speculation")
    }
    described = [__version__, config.model_name, sections, *map(_described, [*target, *draft])]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Identity(
        name=config.model_name,
        root=config.target.model,
        created=int(max(times, default=now())),
        system_fingerprint=f"fp_{digest[:16]}",
    )


def _files(model: str, embedded: Path) -> list[Path]:
    """The files of a checkpoint that is a directory here; a draft without a model has none."""
    directory = embedded if model == EMBEDDED else Path(model)
    if not model or not directory.is_dir():
        return []
    return sorted(_visible(directory))


def _visible(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", *WEIGHT_FILES):
            yield path


def _described(path: Path) -> list[str]:
    """A file's name, and a digest of its content."""
    if path.suffix in WEIGHT_FILES:
        return [path.name, file_digest(path).hex()]
    return [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
