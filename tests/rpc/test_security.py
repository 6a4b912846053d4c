"""Access to engine streams: certificates, secrets, file modes and addresses."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specray.actors.drafts.deployment import DraftLease
from specray.actors.drafts.source import ServeDrafterSource
from specray.actors.node import listen_address, socket_directory
from specray.config import Config, TlsConfig, parse_config
from specray.errors import ConfigError, EngineLostError
from specray.rpc.channel import ChannelOptions, channel_options
from specray.rpc.connection import GrpcDrafter
from specray.rpc.role import DRAFT
from specray.rpc.security import PeerSecurity, server_credentials
from specray.rpc.workers.server import engine_server
from tests.rpc.engines import ScriptedDraft

pytest.importorskip("cryptography")
from tests.rpc.certificates import WORKER_NAME, Authority

DEADLINE_S = 10.0
SECRET = "0123456789abcdef-secret"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("ours")


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority.make("theirs")


def options(tls: TlsConfig | None = None, secret_file: Path | None = None) -> ChannelOptions:
    secret = None if secret_file is None else str(secret_file)
    return ChannelOptions(security=PeerSecurity(tls=tls, secret_file=secret))


@asynccontextmanager
async def serving(
    server_options: ChannelOptions, address: str = "127.0.0.1:0", engine: ScriptedDraft | None = None
) -> AsyncIterator[str]:
    """Runs a draft's server on this loop; yields its address."""
    server = engine_server(
        lambda: engine or ScriptedDraft(), role="draft", address=address, options=server_options
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0.0)


async def check_connects(address: str, client_options: ChannelOptions) -> None:
    drafter = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S, options=client_options)
    assert drafter.info.role == "draft"
    assert (await drafter.fetch_info(timeout_s=DEADLINE_S)).role == "draft"
    await drafter.close()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def replace_file(path: Path, content: bytes | None) -> None:
    path.unlink() if content is None else path.write_bytes(content)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def check_refused(address: str, client_options: ChannelOptions, *, says: str = "UNAVAILABLE") -> None:
    with pytest.raises(EngineLostError, match=says):
        await GrpcDrafter.connect(address, timeout_s=DEADLINE_S, options=client_options)


async def test_a_certificate_of_another_authority_is_refused_by_either_end(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    async with serving(options(authority.write(tmp_path / "server"))) as address:
        # The server does not know who signed the client's.
        await check_refused(address, options(stranger.write(tmp_path / "a", trusts=authority)))
        # The client does not know who signed the server's.
        await check_refused(address, options(authority.write(tmp_path / "b", trusts=stranger)))


async def test_no_certificate_or_no_tls_gets_no_answer_of_any_service(
    authority: Authority, tmp_path: Path
) -> None:
    tls = authority.write(tmp_path / "server")
    async with serving(options(tls)) as address:
        await check_refused(address, options())
        channels = [
            aio.insecure_channel(address),
            aio.secure_channel(address, grpc.ssl_channel_credentials(read(tls.ca))),
        ]
        for channel in channels:
            async with channel:
                with pytest.raises(aio.AioRpcError) as caught:
                    request = health_pb2.HealthCheckRequest()
                    await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_workers_name_is_checked_where_it_is_configured(
    authority: Authority, tmp_path: Path
) -> None:
    async with serving(options(authority.write(tmp_path / "server"))) as address:
        await check_connects(address, options(authority.write(tmp_path / "a", server_name=WORKER_NAME)))
        await check_refused(address, options(authority.write(tmp_path / "b", server_name="other")))


async def test_rotated_certificates_are_used_without_a_restart_and_open_streams_stay(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    server, old, new = tmp_path / "server", tmp_path / "old", tmp_path / "new"
    async with serving(options(authority.write(server))) as address:
        before = options(authority.write(old))
        open_since = await GrpcDrafter.connect(address, timeout_s=DEADLINE_S, options=before)
        stranger.write(server)
        await check_refused(address, before)
        await check_connects(address, options(stranger.write(new)))
        assert (await open_since.fetch_info(timeout_s=DEADLINE_S)).role == "draft"
        # The client's files are read again at every connection, too.
        stranger.write(old)
        await check_connects(address, before)
        await open_since.close()


async def test_unfit_certificates_leave_the_last_ones_in_use(
    authority: Authority, stranger: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = tmp_path / "server"
    client = options(authority.write(tmp_path / "client"))
    async with serving(options(authority.write(server))) as address:
        stranger.write(tmp_path / "other")
        # Half of a rotation: a key that is not the certificate's.
        (server / "key.pem").write_bytes((tmp_path / "other" / "key.pem").read_bytes())
        await check_connects(address, client)
        (server / "cert.pem").unlink()
        await check_connects(address, client)
    assert "the last certificates stay in use" in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("ca", None, r"rpc\.tls\.ca .*No such file"),
        ("cert", None, r"rpc\.tls\.cert .*No such file"),
        ("key", None, r"rpc\.tls\.key .*No such file"),
        ("ca", b"nonsense", r"rpc\.tls\.ca .*no certificates in PEM"),
        ("cert", b"nonsense", r"rpc\.tls\.cert .*allowed: a certificate and its own key"),
        ("key", b"nonsense", r"rpc\.tls\.key .*allowed: a certificate and its own key"),
    ],
)
async def test_an_unfit_file_is_a_config_error_at_the_start(
    authority: Authority, tmp_path: Path, file: str, content: bytes | None, says: str
) -> None:
    tls = authority.write(tmp_path / "server")
    path = Path(getattr(tls, file))
    replace_file(path, content)
    with pytest.raises(ConfigError, match=says):
        server_credentials(tls)
    loaded: list[bool] = []

    def load() -> ScriptedDraft:
        loaded.append(True)
        return ScriptedDraft()

    with pytest.raises(ConfigError, match=says):
        await engine_server(load, role="draft", address="127.0.0.1:0", options=options(tls)).start()
    assert loaded == []  # Said before anything slow.


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_wrong_secret_is_unauthenticated_and_sees_nothing(
    tmp_path: Path, address: str, kind: str
) -> None:
    (tmp_path / "right").write_text(SECRET + "\n")
    (tmp_path / "wrong").write_text(SECRET[:-1] + "x")
    engine = ScriptedDraft()
    listen = address if kind == "unix" else "127.0.0.1:0"
    async with serving(options(secret_file=tmp_path / "right"), listen, engine) as real:
        await check_connects(real, options(secret_file=tmp_path / "right"))
        await check_refused(real, options(secret_file=tmp_path / "wrong"), says="UNAUTHENTICATED")
        await check_refused(real, options(), says="UNAUTHENTICATED")
        async with aio.insecure_channel(real) as channel:
            info: Any = channel.unary_unary(DRAFT.info_path, None, None)
            stream: Any = channel.stream_stream(DRAFT.stream_path, None, None)
            twice = (("authorization", f"Bearer {SECRET}"),) * 2
            for metadata in ((), (("authorization", SECRET),), twice):
                asked: dict[str, Any] = {"metadata": metadata, "timeout": DEADLINE_S}
                for call in (info(b"", **asked), stream(**asked)):
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert await call.details() == "the secret is missing or wrong"
    assert engine.calls == [] and engine.sequences == {}


async def test_a_secret_is_replaced_without_a_restart(tmp_path: Path) -> None:
    path, old = tmp_path / "secret", tmp_path / "old"
    for file in (path, old):
        file.write_text(SECRET)
    async with serving(options(secret_file=path)) as address:
        await check_connects(address, options(secret_file=old))
        path.write_text(SECRET + "2")
        await check_refused(address, options(secret_file=old), says="UNAUTHENTICATED")
        await check_connects(address, options(secret_file=path))
        path.unlink()
        await check_refused(address, options(secret_file=old), says="UNAUTHENTICATED")


async def test_tls_and_a_secret_hold_together(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    tls = authority.write(tmp_path / "both")
    async with serving(options(tls, tmp_path / "secret")) as address:
        await check_connects(address, options(tls, tmp_path / "secret"))
        await check_refused(address, options(tls), says="UNAUTHENTICATED")
        await check_refused(address, options(secret_file=tmp_path / "secret"))


@pytest.mark.parametrize("content", [None, "", "short", "two lines\nof a long secret", "é" * 20])
def test_a_secret_that_is_none_is_a_config_error_without_its_text(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"rpc\.secret_file") as caught:
        options(secret_file=path).security.check()
    assert not content or content not in str(caught.value)


def test_the_configuration_reaches_the_channels() -> None:
    config = parse_config(
        {"rpc": {"tls": {"ca": "/a", "cert": "/b", "key": "/c", "server_name": "w"}, "secret_file": "/s"}}
    )
    security = channel_options(config.rpc).security
    assert (security.tls, security.secret_file) == (config.rpc.tls, "/s")
    assert parse_config(config.model_dump(mode="json")) == config
    assert channel_options(Config().rpc).security.is_open


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"ca": "/a", "cert": "/b"}, "rpc.tls.key: Field required"),
        ({"ca": "/a", "cert": "/b", "key": ""}, r"rpc\.tls\.key: .*at least 1 character \(got ''\)"),
        ({"ca": "/a", "cert": "/b", "key": "/c", "crl": "/d"}, "rpc.tls.crl: Extra inputs"),
    ],
)
def test_a_wrong_tls_section_is_refused(tls: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({"rpc": {"tls": tls}})


async def test_a_unix_socket_is_for_this_user_alone(address: str, socket_path: Path) -> None:
    old = os.umask(0)
    try:
        async with serving(options(), address):
            assert mode_of(socket_path) == 0o600
    finally:
        os.umask(old)


def test_sockets_of_actors_lie_in_a_directory_that_only_this_user_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = os.umask(0)
    try:
        directory = socket_directory(tmp_path)
    finally:
        os.umask(old)
    assert mode_of(directory) == 0o700
    assert socket_directory(tmp_path) == directory
    # Somebody has opened it, or put a link or a file in its place: it is not used.
    directory.chmod(0o755)
    other = socket_directory(tmp_path)
    assert other != directory and mode_of(other) == 0o700
    directory.rmdir()
    directory.symlink_to(other)
    assert socket_directory(tmp_path) not in (directory, other)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    path = Path(listen_address(Config(), "draft").removeprefix("unix:"))
    assert mode_of(path.parent) == 0o700


def test_every_worker_gets_what_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = pytest.importorskip("specray.actors.workers")
    seen: list[ChannelOptions] = []

    class Recorder:
        def __init__(self, _: object, *, role: str, address: str, options: ChannelOptions) -> None:
            seen.append(options)

        def start(self, *, timeout_s: float) -> str:
            return "unix:/x"

    monkeypatch.setattr(workers, "EngineServerThread", Recorder)
    config = parse_config({"rpc": {"secret_file": "/s"}})
    workers.start_draft(config, address="unix:/x")
    workers.start_rank(config, role="target", rank=0, meeting=None, address="unix:/x")
    assert [options.security.secret_file for options in seen] == ["/s", "/s"]


async def test_a_lease_connects_with_what_the_configuration_says(tmp_path: Path, address: str) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    lease = DraftLease(replica_id="r", node_id="n", pid=1, address=address)

    class Handle:
        class lease:
            @staticmethod
            def remote() -> asyncio.Future[DraftLease]:
                future = asyncio.get_running_loop().create_future()
                future.set_result(lease)
                return future

    async with serving(options(secret_file=path), address):
        for shown, is_let_in in ((options(secret_file=path), True), (None, False)):
            source = ServeDrafterSource(
                cast(Any, Handle),
                serve_loop=asyncio.get_running_loop(),
                timeout_s=DEADLINE_S,
                options=shown,
            )
            if is_let_in:
                await (await source.lease()).close()
            else:
                with pytest.raises(EngineLostError, match="UNAUTHENTICATED"):
                    await source.lease()
