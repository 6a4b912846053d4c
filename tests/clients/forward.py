"""Compares scores that lm_eval has read with a forward of transformers in float32; run by make clients."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

MAX_DIFFERENCE = 1e-3
"""Largest difference of a log-likelihood, in nats."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint of the server's target, which computes in float32")
    parser.add_argument("samples", type=Path, help="file that run.py --samples has written")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    worst = 0.0
    scores = json.loads(options.samples.read_text(encoding="utf-8"))
    for score in scores:
        ids = torch.tensor([score["context"] + score["continuation"]])
        with torch.inference_mode():
            logprobs = model(ids).logits[0].log_softmax(-1)
        rows = logprobs[len(score["context"]) - 1 : -1]
        own = torch.tensor(score["continuation"])
        total = rows.gather(1, own[:, None]).sum().item()
        worst = max(worst, abs(total - score["loglikelihood"]))
        if "is_greedy" in score:
            assert bool((rows.argmax(-1) == own).all()) == score["is_greedy"], score
    print(f"{len(scores)} log-likelihoods differ by {worst:.2g} at most; allowed: {MAX_DIFFERENCE:g}")
    return 0 if scores and worst <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
