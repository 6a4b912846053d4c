"""Addresses and gRPC options of channels."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.rpc.channel import Address, ChannelOptions, check_can_listen, parse_address, parse_peer


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("127.0.0.1:9000", Address(host="127.0.0.1", port=9000), "127.0.0.1:9000"),
        ("draft-0.draft.svc:0", Address(host="draft-0.draft.svc", port=0), "draft-0.draft.svc:0"),
        ("[::1]:65535", Address(host="::1", port=65535), "[::1]:65535"),
        ("unix:/tmp/a.sock", Address(path="/tmp/a.sock"), "unix:/tmp/a.sock"),
        ("unix:///tmp/a.sock", Address(path="/tmp/a.sock"), "unix:/tmp/a.sock"),
    ],
)
def test_address_forms(text: str, address: Address, target: str) -> None:
    assert parse_address(text) == address
    assert address.target == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "localhost", ":9000", "localhost:", "localhost:65536", "localhost:-1", "localhost:http"),
        *("::1:9000", "unix:", "unix:relative/path", "unix:/", "unix:/tmp/", "dns:///a:1", "a b:1"),
        "unix:/" + "x" * 107,
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_a_socket_path_of_the_greatest_length_is_allowed() -> None:
    assert parse_address("unix:/" + "x" * 106).path == "/" + "x" * 106


def test_port_zero_is_for_listening_only() -> None:
    with pytest.raises(ConfigError, match=r"a port to connect to is 1\.\.65535"):
        parse_peer("localhost:0")


def test_keepalive_sizes_and_pools_are_set_on_both_sides() -> None:
    options = ChannelOptions(
        max_receive_bytes=1000, max_send_bytes=2000, keepalive_time_s=20.0, keepalive_timeout_s=5.0
    )
    client, server = dict(options.for_client()), dict(options.for_server())
    for side in (client, server):
        assert side["grpc.max_receive_message_length"] == 1000
        assert side["grpc.max_send_message_length"] == 2000
        assert side["grpc.keepalive_time_ms"] == 20_000
        assert side["grpc.keepalive_timeout_ms"] == 5_000
        assert side["grpc.http2.ping_timeout_ms"] == 5_000
        assert side["grpc.keepalive_permit_without_calls"] == 1
        assert side["grpc.http2.max_pings_without_data"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1
    assert client["grpc.enable_http_proxy"] == 0
    assert server["grpc.so_reuseport"] == 0
    assert dict(ChannelOptions(reuse_port=True).for_server())["grpc.so_reuseport"] == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_receive_bytes", 0),
        ("max_send_bytes", 2**31),
        ("keepalive_time_s", 0.0),
        ("keepalive_timeout_s", -1.0),
    ],
)
def test_options_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is "):
        ChannelOptions(**{field: value})  # type: ignore[arg-type]


def test_a_port_in_use_cannot_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use"):
            check_can_listen(parse_address(address))


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        check_can_listen(parse_address("192.0.2.1:0"))


def test_a_socket_in_use_is_refused_and_a_dead_one_is_removed(socket_path: Path) -> None:
    address = Address(path=str(socket_path))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path))
    listener.listen()
    with pytest.raises(ConfigError, match="Address already in use"):
        check_can_listen(address)
    assert socket_path.exists()
    listener.close()
    check_can_listen(address)
    assert not socket_path.exists()


def test_a_socket_path_that_is_a_file_is_refused_and_kept(socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        check_can_listen(Address(path=str(socket_path)))
    assert socket_path.read_text() == "precious"


def test_a_socket_in_a_missing_directory_is_refused(socket_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        check_can_listen(Address(path=str(socket_path.parent / "missing" / "s")))
