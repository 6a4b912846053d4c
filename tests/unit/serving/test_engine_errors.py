"""A request that an engine finds wrong is its caller's mistake, whatever API it came through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specray.config import RouterConfig, SpeculationConfig
from specray.engine.schedule import failure_reply
from specray.errors import GrammarError, InvalidRequestError, SpecrayError
from specray.fakes import FakeTarget, LocalVerifier, ToyModel
from specray.router import Router
from specray.rpc.codec.target import decode_target_replies, encode_target_replies
from specray.rpc.inference.types import GenerateParams
from specray.types import TargetReplies, VerifyItem
from tests.unit.serving.grpc.test_handler import connected
from tests.unit.serving.http.service import TEXT, TOKENIZER, RealClock
from tests.unit.serving.http.service import serving as over_http

WRONG = InvalidRequestError("bad_words is what this engine cannot do", field="bad_words")


class Refusing(FakeTarget):
    """An engine that refuses every item for ``error``, over the wire."""

    def __init__(self, error: SpecrayError) -> None:
        info = FakeTarget(ToyModel()).info
        super().__init__(ToyModel(), info=replace(info, vocab_size=TOKENIZER.vocab_size))
        self._error = error

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        replies = TargetReplies(tuple(failure_reply(item, self._error) for item in items), 1)
        return decode_target_replies(encode_target_replies(replies))


@asynccontextmanager
async def router_over(error: SpecrayError) -> AsyncIterator[Router]:
    clock = RealClock()
    router = Router(
        LocalVerifier(Refusing(error), clock),
        None,
        router=RouterConfig(),
        speculation=SpeculationConfig(),
        model="tiny",
        clock=clock,
    )
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [
        (WRONG, 400, "bad_words"),
        (GrammarError("it cannot go on"), 400, "grammar"),
        (SpecrayError("broken"), 500, None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_engine_error_is_an_http_status_with_its_field(
    error: SpecrayError, status: int, field: str | None, is_stream: bool
) -> None:
    async with router_over(error) as router, over_http(router) as service:
        answered, answer = await service.post("/v1/completions", {**TEXT, "stream": is_stream})
    assert (answered, answer["error"]["param"], answer["error"]["message"]) == (status, field, str(error))


async def test_engine_error_is_an_invalid_argument_with_its_field() -> None:
    async with router_over(WRONG) as router, connected(router) as client:
        with pytest.raises(InvalidRequestError, match=str(WRONG)) as raised:
            async for _ in client.generate(GenerateParams(text="a", max_tokens=4)):
                pass
    assert raised.value.field == "bad_words"
