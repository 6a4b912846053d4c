"""Calls to several models over HTTP and gRPC: scripted Routers, and an owner that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specray.config import ModelConfig, parse_config
from specray.config.live import LiveConfig
from specray.errors import EngineLostError, ModelNotFoundError, NotAllowedError
from specray.fakes import FakeRouterClient
from specray.loading.owner import ModelStatus
from specray.loading.table import ModelState
from specray.requests import AdapterRef, Quota, ServedModel, ServiceLevel
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import GenerateParams
from specray.serving.adapters import OwnStore
from specray.serving.admission.api_keys import Keyring, key_hash
from specray.serving.admission.capacity import Admission
from specray.serving.grpc.handler import GrpcIngress
from specray.serving.grpc.several import SeveralGrpcIngress
from specray.serving.http.app import add_call_routes
from specray.serving.http.several import build_several_app
from specray.serving.http.shell import new_app
from specray.serving.models.catalog import ModelAnswers, ModelCatalog
from specray.serving.models.routers import SeveralRouters
from specray.serving.observe import CallObserver
from tests.unit.serving.http.service import TOKENIZER, Service, endless, events_of, running, say, wait_until

KEY = "sk-specray-models"
VALUES: dict[str, Any] = {
    "models": [
        {"name": "one", "aliases": ["default", "uno"]},
        {"name": "two", "load": "demand", "draft": {"enabled": False}},
    ]
}


class FakeOwner:
    """catalog.Owner: what is loaded is loaded at once, but for what fails."""

    def __init__(self) -> None:
        self.states = {"one": ModelState.LOADED, "two": ModelState.UNLOADED}
        self.loads: list[str] = []
        self.problem: EngineLostError | None = None

    async def load(self, name: str, timeout_s: float) -> ModelStatus:
        self.loads.append(name)
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.states[name] = ModelState.LOADED
        return (await self.statuses())[name]

    async def unload(self, name: str, timeout_s: float) -> ModelStatus:
        self.states[name] = ModelState.UNLOADED
        return (await self.statuses())[name]

    async def statuses(self) -> Mapping[str, ModelStatus]:
        return {name: ModelStatus(state, "", 1.5, None) for name, state in self.states.items()}


class Several:
    """An Ingress in front of two models."""

    def __init__(self, values: dict[str, Any] | None = None, **routers: FakeRouterClient) -> None:
        self.config = LiveConfig(parse_config(values or VALUES))
        self.owner = FakeOwner()
        self.stores = {"one": OwnStore(), "two": OwnStore()}
        self.clients = {"one": say("hello"), "two": say("a é")} | routers
        self.catalog = ModelCatalog(self.config.now, self.owner, self._make)
        self.observer = CallObserver(self.config.now.logging)
        self.keyring = Keyring(self.config.now.auth)
        self.routers = SeveralRouters(self.catalog)
        self.admission = Admission.of(self.routers, self.config.now)

    async def _make(self, model: ModelConfig) -> ModelAnswers:
        config = self.config.now.of_model(model.name)
        admission = self.admission.to_model(
            self.clients[model.name], config, store=self.stores[model.name], aliases=model.aliases
        )
        live, app = LiveConfig(config), new_app()
        limits = add_call_routes(app, admission, TOKENIZER, live)
        grpc = GrpcIngress(client=admission, tokenizer=TOKENIZER, config=live, observer=self.observer)
        return ModelAnswers(model, app, grpc, admission, limits)

    @asynccontextmanager
    async def http(self) -> AsyncIterator[Service]:
        async def metrics(scope: str) -> str:
            return self.observer.metrics.text()

        app = build_several_app(
            catalog=self.catalog,
            routers=self.routers,
            config=self.config,
            admission=self.admission,
            keyring=self.keyring,
            observer=self.observer,
            metrics_text=metrics,
        )
        async with running(app) as service:
            yield service

    @asynccontextmanager
    async def grpc(self, key: str | None = None) -> AsyncIterator[SpecrayClient]:
        handler = SeveralGrpcIngress(self.catalog, self.admission, self.observer, max_bytes=10_000)
        server = InferenceServer(handler, "127.0.0.1:0", admit=handler.admitter(self.keyring))
        await server.start()
        try:
            async with SpecrayClient(server.address, key=key) as client:
                yield client
        finally:
            await server.stop(grace_s=0)

    @property
    def users(self) -> dict[str, int]:
        return {name: use.num_users for name, use in self.catalog.uses.usage().items()}


def body(model: str | None, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "a", "max_tokens": 8, **fields}


async def test_each_call_is_answered_by_the_model_it_names() -> None:
    several = Several()
    async with several.http() as service:
        for name, model, text in (("one", "one", "hello"), ("uno", "one", "hello"), ("two", "two", "a é")):
            status, answer = await service.post("/v1/completions", body(name))
            assert (status, answer["model"], answer["choices"][0]["text"]) == (200, model, text)
        events = await events_of(service, "/v1/completions", body("two", stream=True))
        assert "".join(event["choices"][0]["text"] for event in events) == "a é"
        status, answer = await service.post("/tokenize", {"model": "two", "prompt": "a"})
        assert (status, answer["tokens"]) == (200, list(TOKENIZER.encode("a")))
    # Each was asked of the owner once; nobody uses them now.
    assert several.owner.loads == ["one", "two"]
    assert several.users == {"one": 0, "two": 0}


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ("three", 404, "model 'three' is not served here; allowed: one, default, uno, two"),
        (None, 400, "model is missing; allowed: one, default, uno, two"),
    ],
)
async def test_an_unknown_model_is_told_the_names(asked: str | None, status: int, message: str) -> None:
    async with Several().http() as service:
        answered, answer = await service.post("/v1/completions", body(asked))
        assert (answered, answer["error"]["message"]) == (status, message)


async def test_requests_without_a_model_get_the_default() -> None:
    async with Several({**VALUES, "default_model": "two"}).http() as service:
        status, answer = await service.post("/v1/completions", body(None))
        assert (status, answer["model"]) == (200, "two")


async def test_a_model_is_used_until_the_stream_has_ended_or_its_client_has_left() -> None:
    several = Several(two=endless())
    async with several.http() as service:
        request = asyncio.create_task(events_of(service, "/v1/completions", body("two", stream=True)))
        await wait_until(lambda: several.users["two"] == 1 and len(several.clients["two"].requests) == 1)
        assert not several.catalog.uses.close("two", is_forced=False)
        request.cancel()
        await wait_until(lambda: several.users["two"] == 0)
        assert several.catalog.uses.close("two", is_forced=False)
        status, _ = await service.post("/v1/completions", body("one"))
        assert status == 200


async def test_a_model_that_fails_disturbs_no_other() -> None:
    several = Several()
    async with several.http() as service:
        await service.post("/v1/completions", body("one"))
        several.owner.problem = EngineLostError("model 'two' could not be loaded: its file is cut")
        status, answer = await service.post("/v1/completions", body("two"))
        assert (status, answer["error"]["message"]) == (
            503,
            "model 'two' could not be loaded: its file is cut",
        )
        assert several.users == {"one": 0, "two": 0}
        status, _ = await service.post("/v1/completions", body("one"))
        assert status == 200


async def test_models_are_listed_with_states_and_aliases_and_change_by_calls() -> None:
    async with Several().http() as service:
        async with service.http.get("/v1/models") as response:
            entries = (await response.json())["data"]
        states = {entry["id"]: (entry["parent"], entry["status"]["value"]) for entry in entries}
        assert states == {
            "one": (None, "loaded"),
            "default": ("one", "loaded"),
            "uno": ("one", "loaded"),
            "two": (None, "unloaded"),
        }
        status, answer = await service.post("/v1/models/load", {"model": "two"})
        assert (status, answer["value"], answer["memory_gib"]) == (200, "loaded", 1.5)
        status, answer = await service.post("/v1/models/unload", {"model": "two"})
        assert (status, answer["value"]) == (200, "unloaded")
        status, answer = await service.post("/v1/models/load", {"model": "../two"})
        assert status == 404


async def test_an_adapter_is_found_by_its_models_name_and_aliases() -> None:
    one = {**VALUES["models"][0], "target": {"adapters": {"directory": "/adapters"}}}
    several = Several({"models": [one, VALUES["models"][1]]})
    several.stores["one"].refs["sql"] = AdapterRef("sql", bytes(32), "sql")
    async with several.http() as service:
        answers = []
        for name in ("one:sql", "uno:sql", "uno:none", "two:sql", "uno"):
            async with service.http.get(f"/v1/models/{name}") as response:
                answers.append((response.status, (await response.json()).get("id")))
    assert answers == [(200, "one:sql"), (200, "uno:sql"), (404, None), (404, None), (200, "uno")]


async def test_the_service_is_ready_when_what_it_needs_is_and_a_model_when_it_is() -> None:
    several = Several()
    async with several.http() as service:
        statuses = []
        for path in ("/ready", "/ready?model=one", "/ready?model=two", "/ready?model=three", "/health"):
            async with service.http.get(path) as response:
                statuses.append(response.status)
        assert statuses == [200, 200, 503, 404, 200]
        several.owner.states["one"] = ModelState.FAILED
        async with service.http.get("/ready") as response:
            assert response.status == 503


def with_key(**rights: object) -> dict[str, Any]:
    return {**VALUES, "auth": {"keys": [{"name": "team", "sha256": key_hash(KEY), **rights}]}}


async def test_a_key_asks_only_for_its_models_and_does_not_load_others() -> None:
    several = Several(with_key(models=["one"]))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with several.http() as service:
        for model, status in (("one", 200), ("default", 200), ("two", 403)):
            async with service.http.post("/v1/completions", json=body(model), headers=headers) as response:
                assert response.status == status
                answer = await response.json()
        assert answer["error"]["message"] == "key 'team' may not ask for model 'two'; allowed: one"
        async with service.http.post("/v1/models/load", json={"model": "two"}, headers=headers) as response:
            assert response.status == 403
    assert several.owner.loads == ["one"]
    async with several.grpc(KEY) as client:
        with pytest.raises(NotAllowedError, match="may not ask for model 'two'"):
            await anext(client.generate(GenerateParams(model="two", text="a")))


async def test_a_key_has_limits_for_one_model_and_for_all_together() -> None:
    quotas = {"two": {"max_requests": 1}}
    several = Several(with_key(max_requests=2, model_quotas=quotas), one=endless(), two=endless())
    headers = {"Authorization": f"Bearer {KEY}"}
    async with several.http() as service:

        async def ask(model: str) -> tuple[int, str]:
            async with service.http.post("/v1/completions", json=body(model), headers=headers) as response:
                return response.status, (await response.json())["error"]["message"]

        first = asyncio.create_task(ask("two"))
        await wait_until(lambda: len(several.clients["two"].requests) == 1)
        assert several.clients["two"].requests[0].quota == Quota("team", 1, None)
        assert await ask("two") == (429, "key 'team' has 1 requests of model 'two' in hand; allowed: 1")
        second = asyncio.create_task(ask("one"))
        await wait_until(lambda: len(several.clients["one"].requests) == 1)
        assert several.clients["one"].requests[0].quota == Quota("team", 2, None)
        assert await ask("one") == (429, "key 'team' has 2 requests in hand; allowed: 2")
        first.cancel()
        await wait_until(lambda: several.users["two"] == 0)
        third = asyncio.create_task(ask("two"))
        await wait_until(lambda: len(several.clients["two"].requests) == 2)
        for task in (second, third):
            task.cancel()
        await wait_until(lambda: several.users == {"one": 0, "two": 0})


async def test_requests_without_times_get_those_of_their_model() -> None:
    models = [{"name": "one", "router": {"slo": {"ttft_ms": 50}}}, {"name": "two"}]
    several = Several({"models": models})
    async with several.http() as service:
        for asked in (body("one"), body("one", slo={"itl_ms": 5}), body("two")):
            status, _ = await service.post("/v1/completions", asked)
            assert status == 200
    levels = [request.level for client in several.clients.values() for request in client.requests]
    assert levels == [ServiceLevel(50, None), ServiceLevel(None, 5), None]


async def test_grpc_calls_reach_their_models_too() -> None:
    several = Several()
    async with several.grpc() as client:
        for name, text in (("uno", "hello"), ("two", "a é")):
            params = GenerateParams(model=name, text="a", max_tokens=8)
            assert "".join([event.text async for event in client.generate(params)]) == text
        with pytest.raises(ModelNotFoundError, match="allowed: one, default, uno, two"):
            await anext(client.generate(GenerateParams(model="three", text="a")))
        info = await client.info()
        assert info.model == "one"
        assert info.models == (
            ServedModel("one", ("default", "uno"), "loaded"),
            ServedModel("two", (), "loaded"),
        )
        several.owner.states |= dict.fromkeys(several.owner.states, ModelState.UNLOADED)
        info = await client.info()
        assert (info.model, [each.state for each in info.models]) == ("", ["unloaded", "unloaded"])
    assert several.owner.loads == ["one", "two"]
    await wait_until(lambda: several.users == {"one": 0, "two": 0})
