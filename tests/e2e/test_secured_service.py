"""A service that asks for keys, whose streams ask for a secret; its endpoints listen on loopback only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from specray.bench.compare.peers.process import free_port
from specray.config import Config, parse_config
from specray.errors import UnauthenticatedError
from specray.rpc.inference.client import SpecrayClient
from specray.rpc.inference.types import GenerateParams
from specray.serving.admission.api_keys import key_hash, new_key
from specray.serving.launch import running_service
from tests.e2e.service import DEADLINE_S, family

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

KEY = new_key()
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    secret: Path = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("a secret of this test")
    engine = {"dtype": "float32", "max_model_len": 256, "num_threads": 1, "profile_s": 0}
    config = parse_config(
        {
            "target": engine,
            "draft": engine,
            "speculation": {"num_speculative_tokens": 4},
            "auth": {"keys": [{"name": "team-a", "sha256": key_hash(KEY), "can_observe": True}]},
            "rpc": {"secret_file": str(secret)},
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
            "router": {"start_timeout_s": 120},
        }
    )
    with running_service(config):
        yield config


@pytest.mark.parametrize("key", [KEY, None, new_key()], ids=["right", "none", "wrong"])
async def test_the_right_key_gets_a_speculated_answer_and_others_nothing(
    config: Config, key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": "def fibonacci(n):\n", "max_tokens": 24, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    url = f"http://127.0.0.1:{config.http.port}"
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/v1/models") as response:
            assert response.status == (200 if key == KEY else 401)
        async with http.post(
            "/v1/completions", json={**body, "return_speculation_metrics": True}
        ) as response:
            answer = await response.json()
            assert response.status == (200 if key == KEY else 401)
        assert (response.headers.get("WWW-Authenticate") is None) is (key == KEY)
    if key == KEY:
        # The draft's stream has let the Router in.
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


async def test_the_same_keys_hold_over_grpc(config: Config) -> None:
    address = f"127.0.0.1:{config.grpc.port}"
    async with SpecrayClient(address, key=KEY) as client:
        params = GenerateParams(text="def mean(values):\n", max_tokens=8)
        events = [event async for event in client.generate(params, timeout_s=DEADLINE_S)]
        assert events[-1].finish_reason is not None
    async with SpecrayClient(address) as client:
        with pytest.raises(UnauthenticatedError):
            await client.info()


def sockets_of(process: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def test_the_endpoints_listen_on_loopback_only(config: Config) -> None:
    owners = {inode: process for process in family() for inode in sockets_of(process)}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    listening = {
        (Path(f"/proc/{owners[words[9]]}/comm").read_text().strip(), *words[1].split(":"))
        for words in lines
        if words[3] == "0A" and words[9] in owners
    }
    # Ray's own ports are Ray's: it opens them on every address, whatever the node's.
    own = {(address, int(port, 16)) for _, address, port in listening}
    own = {entry for entry in own if entry[1] in (config.http.port, config.grpc.port)}
    assert {port for _, port in own} == {config.http.port, config.grpc.port}
    assert {address for address, _ in own} <= LOOPBACK
