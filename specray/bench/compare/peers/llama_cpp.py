"""llama.cpp's server, from a directory with its source and the build."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specray.bench.compare.peers.base import BFLOAT16, GGUF, PLAIN, Launch, PeerArm, Setup, stored_file
from specray.bench.compare.peers.process import LOOPBACK
from specray.errors import ConfigError

_SERVER = Path("build", "bin", "llama-server")
_CONVERTER = Path("convert_hf_to_gguf.py")


class LlamaCpp:
    """llama.cpp with checkpoints converted to GGUF, in bfloat16, before its first server starts.

    Args:
        directory: source of llama.cpp, built in ``build``; None: not installed.
        gguf: the target's file for arms with the weights ``gguf``; their draft is its own file, if any.
    """

    name = "llama.cpp"
    modes = (PLAIN, "draft", "ngram")
    max_concurrency = None

    def __init__(self, directory: Path | None, gguf: Path | None = None) -> None:
        self._directory, self._given = directory, gguf

    @property
    def weights(self) -> tuple[str, ...]:
        """The checkpoint's own, and those of the GGUF file where one is given."""
        return (BFLOAT16,) if self._given is None else (BFLOAT16, GGUF)

    def absence(self) -> str | None:
        if self._directory is None:
            return "--llama-cpp is not given"
        for part in (_SERVER, _CONVERTER):
            if not (self._directory / part).is_file():
                return f"--llama-cpp {self._directory}: there is no {part} in it"
        return None

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        """Converts what the arms read and what has changed since the last time."""
        is_read = {
            setup.target: any(arm.weights == BFLOAT16 for arm in arms),
            setup.draft: any(arm.mode == "draft" and _draft_file(arm, setup) is None for arm in arms),
        }
        for checkpoint in (each for each, is_one in is_read.items() if is_one):
            if stored_file(checkpoint) is not None:
                raise ConfigError(
                    f"{checkpoint} has a GGUF file alone; allowed: arms of llama.cpp with @{GGUF}"
                )
            gguf = _gguf(checkpoint, setup)
            newest = max(path.stat().st_mtime for path in checkpoint.iterdir())
            if not gguf.exists() or gguf.stat().st_mtime < newest:
                self._convert(checkpoint, gguf)

    def _convert(self, checkpoint: Path, gguf: Path) -> None:
        assert self._directory is not None
        partial = gguf.with_suffix(".partial")
        command = [
            sys.executable,
            "-m",
            "specray.bench.compare.peers.convert_gguf",
            str(self._directory / _CONVERTER),
        ]
        command += [str(checkpoint), "--outtype", "bf16", "--outfile", str(partial)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900.0)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{checkpoint}: its conversion to GGUF takes over 15 minutes") from None
        if done.returncode:
            reason = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
            raise ConfigError(f"{checkpoint}: it cannot be converted to GGUF: {reason}")
        partial.rename(gguf)

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        assert self._directory is not None
        num_threads, num_slots = str(setup.num_threads), str(setup.max_num_seqs)
        converted = _gguf(setup.target, setup)
        target = self._given if arm.weights == GGUF and self._given is not None else converted
        command = [str(self._directory / _SERVER), "--model", str(target)]
        command += ["--host", LOOPBACK, "--port", str(port)]
        command += ["--threads", num_threads, "--threads-batch", num_threads]
        command += ["--parallel", num_slots, "--ctx-size", str(setup.max_model_len * setup.max_num_seqs)]
        # Its parser of chat templates does not know all of Jinja, and refuses to start; no chat is sent.
        command += ["--no-jinja", "--chat-template", "chatml"]
        command += _speculation(arm, setup)
        return Launch(tuple(command), f"http://{LOOPBACK}:{port}", "/health", {})

    def request_fields(self, temperature: float) -> dict[str, Any]:
        # Its defaults cut the distribution: top_k 40, top_p 0.95, min_p 0.05.
        return {"top_k": 0 if temperature else 1, "top_p": 1.0, "min_p": 0.0}


def _speculation(arm: PeerArm, setup: Setup) -> list[str]:
    k = str(arm.k)
    if arm.mode == "draft":
        file = _draft_file(arm, setup) or _gguf(setup.draft, setup)
        draft = ["--spec-type", "draft-simple", "--spec-draft-model", str(file)]
        return [*draft, "--spec-draft-n-max", k, "--spec-draft-threads", str(setup.num_threads)]
    if arm.mode == "ngram":
        # By default it looks for twelve equal tokens, and so never drafts in a short output.
        lookup = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", k]
        return ["--spec-type", "ngram-simple", *lookup]
    return []


def _draft_file(arm: PeerArm, setup: Setup) -> Path | None:
    """The draft's own GGUF file, beside a target's; None: one is converted."""
    return stored_file(setup.draft) if arm.weights == GGUF else None


def _gguf(checkpoint: Path, setup: Setup) -> Path:
    return setup.work_dir / f"{'draft' if checkpoint == setup.draft else 'target'}.gguf"
