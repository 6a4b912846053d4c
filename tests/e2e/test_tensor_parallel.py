"""A target of two ranks, served by Ray, gives the tokens of the whole model."""

from __future__ import annotations

import aiohttp
import pytest
import torch
from e2e_service import Service, complete
from transformers import AutoModelForCausalLM

from specray.demo.paths import demo_target_path
from specray.tokenization import Tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TENSOR_PARALLEL_SIZE = 2
OVERLAP = "serial"
PROMPT = "def fibonacci(n):\n"
NUM_TOKENS = 48


async def test_two_ranks_serve_the_tokens_of_one(service: Service, http: aiohttp.ClientSession) -> None:
    answer = await complete(
        http, service, prompt=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, return_speculation_metrics=True
    )
    tokenizer = Tokenizer.load(demo_target_path())
    prompt = tokenizer.encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(demo_target_path(), dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    assert answer["choices"][0]["text"] == tokenizer.decode(output[0, len(prompt) :].tolist())
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
