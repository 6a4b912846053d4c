"""Adapters of a soak: random ones for its target, and the fault that loads, swaps and unloads one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from specray.bench.load.client import ServerClient
from specray.config import Config
from specray.errors import ConfigError, EngineLostError, SpecrayError

UNDER_LOAD: Final = ("soak-a", "soak-b")
"""Adapters of requests under load; each is also the name of its folder."""
_SWAPPED: Final = "soak-swapped"
_VERSIONS: Final = ("soak-first", "soak-second")
"""Folders for which ``_SWAPPED`` stands, one after the other."""
_MODULES: Final = (".self_attn.q_proj.weight", ".self_attn.v_proj.weight", ".mlp.down_proj.weight")
_RANK: Final = 4
_STRENGTH: Final = 0.2
"""Size of what an adapter adds to a weight, as a share of the weight's."""
_PROMPT: Final = "def quicksort(values):\n"


def with_adapters(config: Config, directory: Path) -> Config:
    """The configuration of a service whose adapters lie in ``directory``; fewer fit in memory than there are.

    Raises:
        ConfigError: none can be made for the target.
    """
    for seed, name in enumerate((*UNDER_LOAD, *_VERSIONS)):
        _write_adapter(config, directory / name, seed)
    adapters = {"directory": str(directory), "max_loaded": 2, "max_per_step": 2, "autoload": True}
    values = config.model_dump(mode="json")
    values["target"]["adapters"] = adapters
    return Config.model_validate(values)


async def churn(http: ServerClient) -> str:
    """Loads an adapter, puts other bytes under its name, and unloads it; asks each with and without drafts.

    Raises:
        EngineLostError: a call failed, an answer changed with speculation, or both versions answer alike.
    """
    answers: list[str] = []
    try:
        for version in _VERSIONS:
            body = {"lora_name": _SWAPPED, "lora_path": version, "load_inplace": True}
            await http.post("/v1/load_lora_adapter", body)
            drafted, plain = [await _answer(http, is_drafted) for is_drafted in (True, False)]
            if drafted != plain:
                raise EngineLostError(f"the answer of {version} differs with speculation")
            answers.append(plain)
        await http.post("/v1/unload_lora_adapter", {"lora_name": _SWAPPED})
    except EngineLostError:
        raise
    except SpecrayError as error:
        raise EngineLostError(f"an adapter could not be used: {error}") from None
    if answers[0] == answers[1]:
        raise EngineLostError("both versions of an adapter answer alike")
    return "an adapter was loaded, swapped and unloaded"


async def _answer(http: ServerClient, is_drafted: bool) -> str:
    body: dict[str, Any] = {
        "model": _SWAPPED,
        "prompt": _PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"enabled": is_drafted},
    }
    answer = await http.complete(body)
    return str(answer["choices"][0]["text"])


def _write_adapter(config: Config, folder: Path, seed: int) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from specray.engine.model.description import model_path

    source = Path(model_path(config.target, "target"))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # It is no mapping.
                if not name.endswith(_MODULES):
                    continue
                weight = weights.get_tensor(name).float()
                out_features, in_features = weight.shape
                down = torch.randn(_RANK, in_features, generator=generator)
                up = torch.randn(out_features, _RANK, generator=generator)
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = down
                # The product of both has numbers of about the root of the rank.
                tensors[f"{module}.lora_B.weight"] = up * (_STRENGTH * weight.std() / _RANK**0.5)
    if not tensors:
        raise ConfigError(f"target.model is {config.target.model!r}; allowed with adapter-churn: safetensors")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "bias": "none", "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
