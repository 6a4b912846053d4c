"""Tokens over HTTP, with vLLM's bodies."""

from __future__ import annotations

from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import INFO, MAX_MODEL_LEN, MODEL, TOKENIZER, serving
from tests.unit.tokenization.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, PIECES, sentencepiece_tokenizer

CHAT = [{"role": "user", "content": "hi"}]


async def post(path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
    router = FakeRouterClient(info=INFO)
    async with serving(router, **options) as service:
        answer = await service.post(path, body)
    assert router.requests == []
    return answer


async def test_text_is_tokenized_as_for_a_completion() -> None:
    token_ids = list(TOKENIZER.encode("def a"))
    status, answer = await post("/tokenize", {"model": MODEL, "prompt": "def a"})
    assert (status, answer) == (
        200,
        {"count": len(token_ids), "max_model_len": MAX_MODEL_LEN, "tokens": token_ids, "token_strs": None},
    )


async def test_tokens_are_named_as_in_the_vocabulary() -> None:
    tokenizer = sentencepiece_tokenizer()
    _, answer = await post("/tokenize", {"prompt": "My name", "return_token_strs": True}, tokenizer=tokenizer)
    assert answer["token_strs"] == [PIECES[token_id] for token_id in answer["tokens"]]
    assert answer["token_strs"][0].startswith("▁")


async def test_special_tokens_that_the_tokenizer_adds_are_left_out_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def encode(text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        asked.append((text, add_special_tokens))
        return (BOS, 5) if add_special_tokens else (5,)

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    for value, token_ids in [(True, [BOS, 5]), (None, [BOS, 5]), (False, [5])]:
        _, answer = await post("/tokenize", {"prompt": "x", "add_special_tokens": value})
        assert answer["tokens"] == token_ids
    assert asked == [("x", True), ("x", True), ("x", False)]


async def test_conversation_is_tokenized_as_for_a_chat() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        _, answer = await service.post("/tokenize", {"messages": CHAT, "add_special_tokens": False})
        await service.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
    (request,) = router.requests
    assert tuple(answer["tokens"]) == request.prompt_token_ids


async def test_detokenized_text_has_special_tokens() -> None:
    token_ids = [BOS, *TOKENIZER.encode("def é"), EOS]
    assert await post("/detokenize", {"tokens": token_ids}) == (200, {"prompt": "<s>def é</s>"})


async def test_tokenizer_info_has_what_a_remote_tokenizer_reads() -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.get("/tokenizer_info") as response,
    ):
        assert await response.json() == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "vocab_size": TOKENIZER.vocab_size,
            "eos_token_ids": [EOS],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": MAX_MODEL_LEN,
        }


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "temperature": 1.0}, 400, "temperature"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": CHAT, "return_token_strs": "yes"}, 400, "return_token_strs"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
async def test_wrong_bodies_name_their_field(path: str, body: Any, status: int, param: str) -> None:
    answered, answer = await post(path, body)
    assert (answered, answer["error"]["param"]) == (status, param), answer
