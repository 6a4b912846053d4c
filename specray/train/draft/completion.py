"""Makes an ordinary checkpoint of a compact draft and its target, without transformers."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specray.errors import ConfigError
from specray.gguf.light import gguf_weights
from specray.gguf.numbers import read_numbers

COMPACT_WEIGHTS = "compact.safetensors"
"""Name of the file with a draft's body, projections and ids."""
_EMBEDDING = "model.embed_tokens.weight"
_GGUF_EMBEDDING = "token_embd.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def complete_draft(compact: Path, target: Path, destination: Path) -> Path:
    """Writes the draft's checkpoint: its embedding and its head are products with the target's embedding.

    Args:
        compact: directory that ``student.write_compact`` wrote.
        target: checkpoint directory of the target that the draft was trained for.
        destination: directory to write; what is there is replaced.

    Raises:
        ConfigError: the target's embedding is not the one that the draft was trained with.
    """
    config = json.loads((compact / "config.json").read_text("utf-8"))
    tensors = load_file(compact / COMPACT_WEIGHTS)
    embedding = _embedding_of(target)
    expected = config.pop("target_embedding")
    if list(embedding.shape) != expected["shape"] or embedding_digest(embedding) != expected["sha256"]:
        raise ConfigError(
            f"the draft {str(compact)!r} was trained with another embedding than that of {str(target)!r}"
        )
    read, write = tensors.pop("embedding_projection"), tensors.pop("head_projection")
    draft_ids = tensors.pop("draft_ids").long()
    tensors[_EMBEDDING] = (embedding @ read.T).contiguous()
    tensors["lm_head.weight"] = (embedding[draft_ids] @ write).contiguous()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, partial / name)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = json.loads((target / "config.json").read_text("utf-8")).get(key)
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    shutil.rmtree(destination, ignore_errors=True)
    partial.rename(destination)
    return destination


def _embedding_of(target: Path) -> torch.Tensor:
    if (light := gguf_weights(target)) is not None:
        return torch.from_numpy(read_numbers(light, _GGUF_EMBEDDING)).to(torch.bfloat16)
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if _EMBEDDING in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                embedding: torch.Tensor = tensors.get_tensor(_EMBEDDING)
                return embedding.to(torch.bfloat16)
    raise ConfigError(f"the target {str(target)!r} has no tensor {_EMBEDDING!r}")


def embedding_digest(embedding: torch.Tensor) -> str:
    """Returns the SHA-256 of an embedding's bfloat16 bytes: which target a draft belongs to."""
    raw = embedding.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def main() -> int:
    """Completes the draft COMPACT for TARGET as DESTINATION. Returns 0, or 1 after a line."""
    try:
        complete_draft(*map(Path, sys.argv[1:4]))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
