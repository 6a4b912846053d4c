"""What lets one in: the key of the service's API, and certificates and a secret of its engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.config import RpcConfig
from specray.serving.admission.api_keys import new_key

pytest.importorskip("cryptography")
from tests.rpc.certificates import WORKER_NAME, Authority

KEY = new_key()
HEADERS = {"Authorization": f"Bearer {KEY}"}


def write_peers(directory: Path) -> None:
    """Writes a secret, and certificates of the service's authority and of a stranger's."""
    ours, theirs = Authority.make("ours"), Authority.make("theirs")
    ours.write(directory / "ours", server_name=WORKER_NAME)
    theirs.write(directory / "theirs", trusts=ours, server_name=WORKER_NAME)
    (directory / "secret").write_text("a secret of this test")


def peer(directory: Path, certificates: str | None, *, has_secret: bool = True) -> RpcConfig:
    """Returns the RPC configuration of one end."""
    tls = None
    if certificates is not None:
        files = {name: str(directory / certificates / f"{name}.pem") for name in ("ca", "cert", "key")}
        tls = {**files, "server_name": WORKER_NAME}
    secret_file = str(directory / "secret") if has_secret else None
    return RpcConfig.model_validate(
        {"listen": "node", "tls": tls, "secret_file": secret_file, "allow_insecure": not (tls or secret_file)}
    )
