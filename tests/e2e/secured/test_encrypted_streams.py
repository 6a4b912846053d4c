"""A service whose engines are reached over TCP: certificates and a secret stand before every stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray import serve

from specray.errors import EngineLostError, SpecrayError
from specray.rpc.channel import channel_options
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from specray.serving.launch import APP_NAME
from tests.e2e.listeners import listeners
from tests.e2e.secured.access import peer
from tests.e2e.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

CONNECT_S = 5.0


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
    service: Service, directory: Path, certificates: str | None, has_secret: bool, says: str | None
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
