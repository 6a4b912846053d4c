"""A service whose engines are reached over TCP: certificates and a secret stand before every stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from ray import serve

from specray.bench.compare.peers.process import free_port
from specray.config import Config, RpcConfig, parse_config
from specray.errors import EngineLostError, SpecrayError
from specray.rpc.channel import channel_options
from specray.rpc.connections.drafter import GrpcDrafter
from specray.rpc.connections.verifier import GrpcVerifier
from specray.serving.launch import APP_NAME, running_service
from tests.e2e.listeners import listeners
from tests.e2e.service import DEADLINE_S

pytest.importorskip("cryptography")
from tests.rpc.certificates import WORKER_NAME, Authority

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CONNECT_S = 5.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("peers")
    ours, theirs = Authority.make("ours"), Authority.make("theirs")
    ours.write(directory / "ours", server_name=WORKER_NAME)
    theirs.write(directory / "theirs", trusts=ours, server_name=WORKER_NAME)
    (directory / "secret").write_text("a secret of this test")
    return directory


def peer(directory: Path, certificates: str | None, *, has_secret: bool = True) -> RpcConfig:
    """Returns the RPC configuration of one end."""
    tls = None
    if certificates is not None:
        files = {name: str(directory / certificates / f"{name}.pem") for name in ("ca", "cert", "key")}
        tls = {**files, "server_name": WORKER_NAME}
    secret_file = str(directory / "secret") if has_secret else None
    return RpcConfig.model_validate({"listen": "node", "tls": tls, "secret_file": secret_file})


@pytest.fixture(scope="module")
def config(directory: Path) -> Iterator[Config]:
    engine = {"dtype": "float32", "max_model_len": 256, "num_threads": 1, "profile_s": 0}
    config = parse_config(
        {
            "target": engine,
            "draft": engine,
            "speculation": {"num_speculative_tokens": 4},
            "rpc": peer(directory, "ours").model_dump(),
            "http": {"port": free_port()},
            "grpc": {"port": 0},
            "router": {"start_timeout_s": 120},
        }
    )
    with running_service(config):
        yield config


async def post(config: Config, *, is_stream: bool) -> str:
    body = {"prompt": "def mean(values):\n", "max_tokens": 24, "temperature": 0, "stream": is_stream}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{config.http.port}", timeout=timeout) as http:
        asked = {**body, "return_speculation_metrics": True}
        async with http.post("/v1/completions", json=asked) as response:
            assert response.status == 200
            return await response.text()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_requests_are_speculated_over_encrypted_streams(config: Config, is_stream: bool) -> None:
    text = await post(config, is_stream=is_stream)
    assert '"num_accepted_draft_tokens":' in text
    assert '"num_accepted_draft_tokens":0' not in text


async def draft_address() -> str:
    lease = await serve.get_deployment_handle("Draft", app_name=APP_NAME).lease.remote()
    return str(lease.address)


@pytest.mark.parametrize(
    ("certificates", "has_secret", "says"),
    [
        ("ours", True, None),
        ("ours", False, "UNAUTHENTICATED"),
        ("theirs", True, "UNAVAILABLE"),
        (None, True, "UNAVAILABLE"),
        (None, False, "UNAVAILABLE"),
    ],
    ids=["a peer", "no secret", "strange certificate", "no certificate", "nothing"],
)
async def test_a_stranger_learns_nothing_of_the_engines(
    config: Config, directory: Path, certificates: str | None, has_secret: bool, says: str | None
) -> None:
    options = channel_options(peer(directory, certificates, has_secret=has_secret))
    address = await draft_address()
    assert not address.startswith("unix:")
    ports = {entry.port for entry in listeners(os.getpid()) if entry.process.startswith("ray::TargetRank")}
    host = address.rpartition(":")[0]
    if says is None:
        drafter = await GrpcDrafter.connect(address, timeout_s=CONNECT_S, options=options)
        await drafter.close()
        assert len([port for port in ports if await is_target(f"{host}:{port}", options)]) == 1
        return
    with pytest.raises(EngineLostError, match=says):
        await GrpcDrafter.connect(address, timeout_s=CONNECT_S, options=options)
    assert [port for port in ports if await is_target(f"{host}:{port}", options)] == []


async def is_target(address: str, options: object) -> bool:
    """True if a target answers at the address."""
    try:
        verifier = await GrpcVerifier.connect(address, timeout_s=CONNECT_S, options=options)  # type: ignore[arg-type]
    except SpecrayError:
        return False
    await verifier.close()
    return verifier.info.role == "target"
