"""Security of the streams between router, draft and target: certificates over TCP, and a shared secret.

Certificates are read again for every handshake and the secret for every call, so both can be replaced without
a restart; open streams stay open. Unix sockets have no TLS: file modes say who may connect. The health
service answers everyone who passes the handshake.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import grpc
from grpc import aio

from specray.config import TlsConfig
from specray.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_SECRET_CHARS: Final = 16
_METADATA_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PeerSecurity:
    """Credentials that both ends of a stream require of each other; by default none."""

    tls: TlsConfig | None = None
    """Certificate files; both ends show a certificate of one authority. None: no TLS."""
    secret_file: str | None = None
    """File with the secret that the client sends; None: no secret."""

    @property
    def is_open(self) -> bool:
        """Whether everyone who reaches the port is served."""
        return self.tls is None and self.secret_file is None

    def check(self) -> None:
        """Checks the files. Raises ConfigError naming a file that is missing or invalid."""
        if self.tls is not None:
            _read_certificates(self.tls)
        if self.secret_file is not None:
            read_secret(self.secret_file)

    def metadata(self) -> Metadata:
        """Metadata that a client sends with every call. Raises ConfigError when the secret cannot be read."""
        if self.secret_file is None:
            return ()
        return ((_METADATA_KEY, _SCHEME + read_secret(self.secret_file)),)

    async def admit(self, context: aio.ServicerContext[Any, Any]) -> None:
        """Admits a peer that sends the secret; ends another's call with UNAUTHENTICATED."""
        if self.secret_file is not None and not self._shows_secret(self.secret_file, context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the secret is missing or wrong")

    def _shows_secret(self, path: str, context: aio.ServicerContext[Any, Any]) -> bool:
        try:
            expected = (_SCHEME + read_secret(path)).encode()
        except ConfigError as error:
            logger.error("all peers are refused: %s", error)
            return False
        shown = [value for name, value in context.invocation_metadata() or () if name == _METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(_as_bytes(shown[0]), expected)


def read_secret(path: str) -> str:
    """Reads the secret, stripped of white space. Raises ConfigError, whose message never has the secret."""
    try:
        secret = Path(path).read_text("ascii").strip()
    except OSError as error:
        raise ConfigError(f"rpc.secret_file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"rpc.secret_file {path}: allowed: ASCII characters") from None
    if len(secret) < MIN_SECRET_CHARS or not secret.isprintable():
        raise ConfigError(
            f"rpc.secret_file {path} holds {len(secret)} characters; "
            f"allowed: one line of at least {MIN_SECRET_CHARS}"
        )
    return secret


def client_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials for a new connection. Raises ConfigError for a file that is missing or invalid."""
    files = _read_certificates(tls)
    return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a server that requires client certificates and reloads its own when files change.

    Raises:
        ConfigError: a file is missing or invalid. Later invalid files are ignored until they are valid again.
    """
    source = _CertificateSource(tls)
    # The stubs do not know that None means: no change.
    changed = cast(Callable[[], grpc.ServerCertificateConfiguration], source.changed)
    return grpc.dynamic_ssl_server_credentials(source.first(), changed, require_client_authentication=True)


@dataclass(frozen=True, slots=True)
class _Certificates:
    ca: bytes
    cert: bytes
    key: bytes

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)


class _CertificateSource:
    """Source of a server's certificates, which gRPC queries before every handshake."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._last = _read_certificates(tls)

    def first(self) -> grpc.ServerCertificateConfiguration:
        return self._last.configuration()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns new certificates, or None to keep the last ones."""
        try:
            files = _read_certificates(self._tls)
        except ConfigError as error:
            logger.error("the last certificates stay in use, since new ones are invalid: %s", error)
            return None
        if files == self._last:
            return None
        self._last = files
        return files.configuration()


def _read_certificates(tls: TlsConfig) -> _Certificates:
    """Reads the files. Raises ConfigError when one is missing or not PEM, or certificate and key differ."""
    contents = []
    for field in ("ca", "cert", "key"):
        path = Path(getattr(tls, field))
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"rpc.tls.{field} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=contents[0].decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"rpc.tls.ca {tls.ca}: no certificates in PEM: {_reason(error)}") from None
    try:
        # Without a password for the key, openssl would ask for one at the terminal.
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(
            f"rpc.tls.cert {tls.cert} and rpc.tls.key {tls.key}: allowed: a certificate and its own key, "
            f"unencrypted, in PEM: {_reason(error)}"
        ) from None
    return _Certificates(*contents)


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
