"""Adapters by name, over HTTP and gRPC, in front of a Router whose target's tokens depend on the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.errors import InvalidRequestError, ModelNotFoundError
from specray.fakes import FakeAdapterTarget, FakeTarget, LocalVerifier, ToyModel, adapted
from specray.interfaces import Verifier
from specray.requests import AdapterRef
from specray.router import Router
from specray.rpc.inference.types import GenerateParams
from specray.serving.adapters import FRESH_S, AdapterCatalog, OwnStore
from specray.serving.admission.capacity import Admission
from tests.unit.serving.grpc.test_handler import connected
from tests.unit.serving.http.service import MODEL, TOKENIZER, RealClock, Service
from tests.unit.serving.http.service import serving as over_http

TOY = ToyModel(vocab_size=TOKENIZER.vocab_size)
PROMPT = (5, 6, 7)
DIGESTS = {name: name.encode().ljust(32, b"\1") for name in ("sql", "chat", "code")}


def config_of(**adapters: Any) -> Config:
    target = {"adapters": {"directory": "/adapters", **adapters}}
    return parse_config({"served_model_name": MODEL, "target": target})


def new_target() -> FakeAdapterTarget:
    info = replace(FakeTarget(TOY).info, vocab_size=TOKENIZER.vocab_size)
    return FakeAdapterTarget(TOY, folders=dict(DIGESTS), info=info)


@asynccontextmanager
async def router_over(target: FakeTarget, config: Config) -> AsyncIterator[Router]:
    clock = RealClock()
    verifier: Verifier = LocalVerifier(target, clock)
    router = Router(verifier, None, model=MODEL, clock=clock, adapters=config.target.adapters)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


@asynccontextmanager
async def serving(
    target: FakeTarget | None = None, config: Config | None = None, store: OwnStore | None = None
) -> AsyncIterator[Service]:
    config = config or config_of()
    async with router_over(target or new_target(), config) as router:
        admission = Admission.of(router, config, store=store)
        async with over_http(admission, config=config) as service:
            yield service


async def output(service: Service, model: str = MODEL, **fields: Any) -> list[int]:
    body = {"model": model, "prompt": list(PROMPT), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, answer = await service.post("/v1/completions", {**body, "return_token_ids": True, **fields})
    assert status == 200, answer
    assert answer["model"] == (fields.get("adapter") or model.removeprefix(f"{MODEL}:"))
    return list(answer["choices"][0]["token_ids"])


def expected(digest: bytes = b"") -> list[int]:
    return list(adapted(TOY, digest).generate(PROMPT, 6))


async def load(service: Service, name: str, path: str | None = None, **fields: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": path or name, **fields}
    return await service.post("/v1/load_lora_adapter", body)


async def models(service: Service) -> dict[str, tuple[str | None, str]]:
    async with service.http.get("/v1/models") as response:
        return {each["id"]: (each["parent"], each["root"]) for each in (await response.json())["data"]}


async def test_an_adapter_is_loaded_listed_asked_by_either_name_and_unloaded() -> None:
    async with serving() as service:
        assert await load(service, "sql") == (
            200,
            {"lora_name": "sql", "lora_path": "sql", "digest": DIGESTS["sql"].hex()},
        )
        assert await models(service) == {MODEL: (None, "embedded"), "sql": (MODEL, "sql")}
        assert await output(service, "sql") == expected(DIGESTS["sql"]) != expected()
        assert await output(service, f"{MODEL}:sql") == expected(DIGESTS["sql"])
        assert await output(service, adapter="sql") == expected(DIGESTS["sql"])
        assert await output(service) == expected()
        async with service.http.get("/v1/models/sql") as response:
            assert (await response.json())["adapter"] == DIGESTS["sql"].hex()
        assert (await service.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))[0] == 200
        assert list(await models(service)) == [MODEL]
        status, answer = await service.post("/v1/completions", {"model": "sql", "prompt": "a"})
        assert (status, answer["error"]["message"]) == (
            404,
            f"model 'sql' is not served here; allowed: '{MODEL}'",
        )


async def test_what_is_not_there_is_404_with_the_names_on_every_path() -> None:
    async with serving() as service:
        await load(service, "sql")
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {**chat, "max_tokens": 4}),
            ("/tokenize", {"prompt": "a"}),
        ):
            for model in ("nobody", f"{MODEL}:nobody", "sql:sql", "../sql"):
                status, answer = await service.post(path, {**body, "model": model})
                assert status == 404, (path, model, answer)
                assert f"is not served here; allowed: '{MODEL}', 'sql'" in str(answer)
        status, answer = await service.post(
            "/v1/completions", {"model": "sql", "prompt": "a", "adapter": "chat"}
        )
        assert (status, answer["error"]["param"]) == (400, "adapter")
        # The base is no adapter: it is no name to give there.
        status, answer = await service.post("/v1/completions", {"prompt": "a", "adapter": MODEL})
        assert (status, answer["error"]["message"]) == (
            404,
            f"adapter '{MODEL}' is not served here; allowed: 'sql'",
        )


@pytest.mark.parametrize(
    ("fields", "status", "field", "message"),
    [
        ({"lora_path": "../etc"}, 400, "lora_path", "is not in the directory of adapters"),
        ({"lora_path": "/etc"}, 400, "lora_path", "is not in the directory of adapters"),
        ({"lora_name": "a/b"}, 400, "lora_name", "lora_name is 'a/b'; allowed"),
        ({"lora_name": ""}, 400, "lora_name", "lora_name is ''; allowed"),
        ({"lora_name": "x" * 65}, 400, "lora_name", "allowed"),
        ({"lora_name": MODEL}, 400, "lora_name", f"lora_name is '{MODEL}'; allowed"),
        ({"lora_name": "sql"}, 400, "lora_name", "lora_name 'sql' is loaded; allowed: another name, or"),
        ({"lora_path": 3}, 400, "lora_path", "lora_path is 3"),
        ({"scale": 2}, 400, "scale", "scale is not a field of this API"),
        ({"model": "other"}, 404, "model", f"model 'other' is not served here; allowed: '{MODEL}'"),
    ],
)
async def test_a_load_that_is_refused_says_why_in_one_sentence_and_changes_nothing(
    fields: dict[str, Any], status: int, field: str, message: str
) -> None:
    target = new_target()
    async with serving(target) as service:
        await load(service, "sql")
        before, loaded = await models(service), target.slots.loaded
        body = {"lora_name": "new", "lora_path": "chat", **fields}
        answered, answer = await service.post("/v1/load_lora_adapter", body)
        assert (answered, answer["error"]["param"]) == (status, field)
        assert message in answer["error"]["message"]
        assert (await models(service), target.slots.loaded) == (before, loaded)


async def test_a_service_without_adapters_refuses_and_never_answers_for_the_base() -> None:
    plain = parse_config({"served_model_name": MODEL})
    async with serving(FakeTarget(TOY), plain) as service:
        status, answer = await load(service, "sql")
        assert (status, answer["error"]["message"]) == (
            400,
            "this service has no adapters; set target.adapters",
        )
        assert (await service.post("/v1/completions", {"model": "sql", "prompt": "a"}))[0] == 404
    # The Ingress is newer than the target.
    async with serving(FakeTarget(TOY), config_of(autoload=True)) as service:
        status, answer = await service.post("/v1/completions", {"adapter": "sql", "prompt": "a"})
        assert status == 404
        assert "this target knows no adapters" in answer["error"]["message"]


async def test_the_same_name_gets_other_bytes_in_place_alone() -> None:
    target = new_target()
    async with serving(target) as service:
        await load(service, "sql")
        target.folders["sql"] = b"2" * 32
        assert await output(service, "sql") == expected(DIGESTS["sql"])
        assert (await load(service, "sql"))[0] == 400
        assert (await load(service, "sql", load_inplace=True))[0] == 200
        assert await output(service, "sql") == expected(b"2" * 32)
        # Two names of the same bytes: the adapter stays until the second has gone.
        await load(service, "again", "sql")
        await service.post("/unload_lora_adapter", {"lora_name": "sql"})
        assert [each.digest for each in target.slots.loaded] == [b"2" * 32]
        await service.post("/unload_lora_adapter", {"lora_name": "again"})
        assert target.slots.loaded == ()


async def test_preloaded_adapters_are_listed_and_others_load_on_first_use_where_that_is_allowed() -> None:
    async with serving(config=config_of(preload=["chat"], pinned=["chat"])) as service:
        assert list(await models(service)) == [MODEL, "chat"]
        assert await output(service, "chat") == expected(DIGESTS["chat"])
        assert (await service.post("/v1/completions", {"model": "code", "prompt": "a"}))[0] == 404
    async with serving(config=config_of(autoload=True)) as service:
        outputs = await asyncio.gather(*(output(service, "code") for _ in range(4)))
        assert outputs == [expected(DIGESTS["code"])] * 4
        assert list(await models(service)) == [MODEL, "code"]


@pytest.mark.parametrize("key", ["preload", "pinned"])
async def test_what_the_configuration_names_stays_away_once_unloaded_until_it_is_loaded(key: str) -> None:
    target, store = new_target(), OwnStore()
    async with serving(target, config_of(**{key: ["chat"]}), store) as service:
        assert await output(service, "chat") == expected(DIGESTS["chat"])
        assert (await service.post("/v1/unload_lora_adapter", {"lora_name": "chat"}))[0] == 200
    # Neither a list nor a request brings it back, at no other Ingress either.
    async with serving(target, config_of(**{key: ["chat"]}), store) as service:
        assert list(await models(service)) == [MODEL]
        assert (await service.post("/v1/completions", {"model": "chat", "prompt": "a"}))[0] == 404
        status, answer = await service.post("/v1/unload_lora_adapter", {"lora_name": "chat"})
        assert (status, answer["error"]["message"]) == (
            404,
            "lora_name 'chat' is not served here; allowed: none, no adapter is loaded",
        )
        assert target.slots.loaded == ()
        assert (await load(service, "chat"))[0] == 200
        assert await output(service, "chat") == expected(DIGESTS["chat"])


async def test_of_loads_of_one_name_at_a_time_one_is_taken_and_the_others_leave_nothing() -> None:
    target = new_target()
    async with serving(target) as service:
        answers = await asyncio.gather(*(load(service, "one", path) for path in DIGESTS))
        assert sorted(status for status, _ in answers) == [200, 400, 400]
        (taken,) = [answer["lora_path"] for status, answer in answers if status == 200]
        assert await output(service, "one") == expected(DIGESTS[taken])
        assert [each.digest for each in target.slots.loaded] == [DIGESTS[taken]]


async def test_of_two_ingresses_that_take_a_name_at_once_one_has_it() -> None:
    class Late(OwnStore):
        """Which both have read before either of them writes."""

        async def claim(self, ref: AdapterRef) -> bool:
            await asyncio.sleep(0.01)
            return await super().claim(ref)

    target, store, config = new_target(), Late(), config_of()
    async with router_over(target, config) as router:
        catalogs = [
            AdapterCatalog(config.target.adapters, base=MODEL, loader=router, store=store) for _ in range(2)
        ]
        answers = await asyncio.gather(
            *(each.load("one", path) for each, path in zip(catalogs, ("sql", "chat"), strict=True)),
            return_exceptions=True,
        )
        (taken,) = [each for each in answers if isinstance(each, AdapterRef)]
        (refused,) = [each for each in answers if isinstance(each, InvalidRequestError)]
        assert str(refused).startswith("lora_name 'one' is loaded; allowed: another name")
        assert store.refs == {"one": taken}
        assert [each.digest for each in target.slots.loaded] == [taken.digest]


async def test_ingresses_see_the_same_names_and_a_new_one_knows_them() -> None:
    config, store, now = config_of(), OwnStore(), [0.0]
    async with router_over(new_target(), config) as router:
        first, second = (
            AdapterCatalog(
                config.target.adapters, base=MODEL, loader=router, store=store, monotonic=lambda: now[0]
            )
            for _ in range(2)
        )
        ref = await first.load("sql", "sql")
        assert await second.find("sql") == ref
        await first.load("sql", "chat", in_place=True)
        now[0] += FRESH_S
        found = await second.find(f"{MODEL}:sql")
        assert found is not None
        assert (found.digest, found.folder) == (DIGESTS["chat"], "chat")
        await second.unload("sql")
        now[0] += FRESH_S
        with pytest.raises(ModelNotFoundError):
            await first.find("sql")


async def test_grpc_has_the_field_and_the_names() -> None:
    config = config_of(autoload=True)
    async with router_over(new_target(), config) as router, connected(Admission.of(router, config)) as client:
        for given in ({"adapter": "sql"}, {"model": "sql"}, {"model": f"{MODEL}:sql"}):
            params = GenerateParams(
                token_ids=PROMPT,
                max_tokens=6,
                temperature=0.0,
                ignore_eos=True,
                **given,  # type: ignore[arg-type]
            )
            token_ids = [token async for event in client.generate(params) for token in event.token_ids]
            assert token_ids == expected(DIGESTS["sql"])
        with pytest.raises(ModelNotFoundError, match="'nobody' is not served here"):
            async for _ in client.generate(GenerateParams(token_ids=PROMPT, adapter="nobody")):
                pass
        with pytest.raises(InvalidRequestError):
            async for _ in client.generate(GenerateParams(token_ids=PROMPT, adapter="x" * 65)):
                pass
