"""Runs ``generate`` of transformers on the same checkpoints and prompts: plain, and with an assistant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def measure(
    target: str,
    draft: str,
    prompts: Sequence[Sequence[int]],
    *,
    device: str,
    dtype: str,
    max_tokens: int,
    num_repeats: int,
    ks: Sequence[int],
) -> dict[str, Any]:
    """Generates greedily, one prompt after another.

    Args:
        prompts: prompts as token ids.
        ks: numbers of assistant tokens, one for each assisted arm.
    """
    model, assistant = _load(target, device, dtype), _load(draft, device, dtype)
    arms, outputs = [], []
    for k in (None, *ks):
        options: dict[str, Any] = {}
        if k is not None:
            options["assistant_model"] = assistant
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        _generate(model, prompts[0], max_tokens, options)
        began = time.perf_counter()
        passes = [
            [_generate(model, prompt, max_tokens, options) for prompt in prompts] for _ in range(num_repeats)
        ]
        seconds = time.perf_counter() - began
        outputs.append(passes[0])
        num_tokens = sum(len(output) for one_pass in passes for output in one_pass)
        name = "generate" if k is None else f"assisted K={k}"
        arms.append({"arm": name, "tokens_per_s": num_tokens / seconds})
    return {"dtype": dtype, "arms": arms, "greedy": outputs[0]}


def _load(path: str, device: str, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.to(device).eval()
    # generate() takes missing options from the model's configuration: no end of sequence there.
    model.generation_config.eos_token_id = None
    return model


def _generate(model: Any, prompt: Sequence[int], max_tokens: int, options: dict[str, Any]) -> list[int]:
    """Returns the new token ids; copying them to the host waits for the device."""
    token_ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=1,
        **options,
    )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated
