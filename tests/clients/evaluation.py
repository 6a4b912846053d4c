"""Checks of lm_eval: tasks of its own, scored through ``local-completions`` with the server's tokenizer."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import Server, check

QUESTIONS = (
    {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
    {"question": "Two and two make", "choices": [" seventeen", " four"], "answer": 1},
    {"question": "Water freezes into", "choices": [" ice", " fire", " gold"], "answer": 0},
)
TEXTS = (
    {"text": "The quick brown fox jumps over the lazy dog."},
    {"text": "Once upon a time there was a king, and he had three daughters."},
)
PLACES = 1e-9
"""Share by which sums of the same numbers may differ."""


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """A task of choices and one of whole texts, over files in ``folder``."""
    tasks = list[dict[str, Any]]()
    for name, rows, fields in (
        (
            "local_choices",
            QUESTIONS,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "target_delimiter": "",
                "metric_list": [{"metric": "acc"}],
            },
        ),
        (
            "local_texts",
            TEXTS,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
        ),
    ):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        tasks.append({"task": name, "test_split": "test", **data, **fields})
    return tasks


def _model(server: Server) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=server.model,
        base_url=f"{server.base_url}/completions",
        tokenizer_backend="remote",
        auth_token=server.key,
        header={"Authorization": f"Bearer {server.key}"},
        max_retries=1,
        batch_size=2,
    )


@check("lm_eval")
def choices_and_rolling_texts(server: Server) -> None:
    import lm_eval

    model = _model(server)
    with tempfile.TemporaryDirectory() as folder:
        found = lm_eval.simple_evaluate(
            model=model, tasks=_tasks(Path(folder)), log_samples=True, bootstrap_iters=0
        )
    assert 0 <= found["results"]["local_choices"]["acc,none"] <= 1
    assert found["results"]["local_texts"]["word_perplexity,none"] > 1
    scores = [
        _score(model, *argument, *response[0])
        for sample in found["samples"]["local_choices"]
        for argument, response in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    assert len(scores) == sum(len(row["choices"]) for row in QUESTIONS)
    for sample in found["samples"]["local_texts"]:
        (text,), ((total,),) = sample["arguments"][0], sample["resps"]
        ids = model.tok_encode(text)
        scores.append({"context": [model.prefix_token_id], "continuation": ids, "loglikelihood": total})
    assert all(score["loglikelihood"] < 0 for score in scores)
    if server.samples is not None:
        server.samples.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


def _score(model: Any, context: str, continuation: str, total: float, is_greedy: bool) -> dict[str, Any]:
    before, after = model._encode_pair(context, continuation)
    return {"context": before, "continuation": after, "loglikelihood": total, "is_greedy": is_greedy}


@check("lm_eval")
def scores_do_not_depend_on_the_batch(server: Server) -> None:
    from lm_eval.api.instance import Instance

    model = _model(server)
    requests = [
        Instance("loglikelihood", {}, (row["question"], choice), place)
        for place, row in enumerate(QUESTIONS)
        for choice in row["choices"]
    ]
    together = model.loglikelihood(requests)
    alone = [model.loglikelihood([request])[0] for request in requests]
    assert all(
        math.isclose(one[0], other[0], rel_tol=1e-3) and one[1] == other[1]
        for one, other in zip(together, alone, strict=True)
    )
