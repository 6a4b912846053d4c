"""A tiny GGUF file, wheels that carry it, and a listener that remembers: for tests of fetched models."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from specray.errors import ConfigError
from specray.models.catalogue import KnownModel, Wheel

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 64, 2, 1, 96, 2
CHAT_TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|start|>", "<|end|>", *ALPHABET, "he", "ll"]
MERGES = ["h e", "l l"]


class Recorder:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.works: list[tuple[str, int, int | None]] = []

    def notice(self, line: str) -> None:
        self.notices.append(line)

    def progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        self.works.append((what, done, total))


def tensor_values(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a tiny Llama model by their names in GGUF, before they are quantised."""
    draw = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, MLP),
        }
    shapes["output_norm.weight"] = (HIDDEN,)
    return {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    values: dict[str, str | int] | None = None,
    seed: int = 0,
) -> Path:
    """Writes a tiny model: matrices in Q8_0, vectors in float32.

    Args:
        tensors: the tensors; None: those of ``tensor_values``.
        values: more keys of the header.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (values or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in (tensor_values(seed) if tensors is None else tensors).items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            packed = gguf.quantize(tensor, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Writes what was added to a writer; returns the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(directory: Path, project: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """Writes a wheel that pip accepts, with these files."""
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_known(
    directory: Path,
    content: bytes,
    *,
    name: str = "tiny-chat",
    project: str = "tiny",
    num_parts: int = 2,
    draft: KnownModel | None = None,
) -> KnownModel:
    """Writes a GGUF file into wheels, and returns the known model that they make."""
    piece = len(content) // num_parts
    wheels = []
    for index in range(num_parts):
        part = content[index * piece : None if index == num_parts - 1 else (index + 1) * piece]
        member = f"tiny_part{index}/data/tiny.gguf.part{index}"
        size = write_wheel(directory, f"{project}-part{index}", {member: part}).stat().st_size
        digest = hashlib.sha256(part).hexdigest()
        wheels.append(Wheel(f"{project}-part{index}", "1.0", member, size, len(part), digest))
    return KnownModel(
        name=name,
        wheels=tuple(wheels),
        sha256=hashlib.sha256(content).hexdigest(),
        hub_id="owner/tiny",
        licence="MIT",
        draft=draft,
    )


class CopiedWheels:
    """Stands for pip, which is a process for each wheel: copies from the directory that is its index."""

    def __init__(self) -> None:
        self.started: list[str] = []
        """Projects of the wheels, in the order of their downloads."""
        self.ended: list[str] = []
        """Those that were ended before they arrived."""
        self.held: set[str] = set()
        """Those that do not arrive."""

    def __call__(self, wheel: Wheel, directory: Path) -> CopiedWheel:
        self.started.append(wheel.project)
        return CopiedWheel(self, wheel, directory)


class CopiedWheel:
    """A wheel that such a pip downloads."""

    def __init__(self, pip: CopiedWheels, wheel: Wheel, directory: Path) -> None:
        self._pip, self._wheel, self._directory, self._is_here = pip, wheel, directory, False

    @property
    def num_bytes(self) -> int:
        return self._wheel.size if self._is_here else 0

    def arrived(self) -> Path | None:
        if self._wheel.project in self._pip.held:
            return None
        name = f"{self._wheel.project.replace('-', '_')}-{self._wheel.version}-py3-none-any.whl"
        path = Path(os.environ["PIP_FIND_LINKS"]) / name
        if not path.exists():
            raise ConfigError(f"{self._wheel.requirement} cannot be downloaded: it is not there")
        self._is_here = True
        return Path(shutil.copy(path, self._directory))

    def end(self) -> None:
        if not self._is_here:
            self._pip.ended.append(self._wheel.project)


def use_index(monkeypatch: pytest.MonkeyPatch, directory: Path | None) -> None:
    """Makes a directory of wheels the only index of pip; None: there is none (see tests/conftest.py)."""
    if directory is None:
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    else:
        monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
