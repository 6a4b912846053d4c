"""Who may open a stream between router, draft and target: certificates over TCP, and a shared secret.

Certificates are read again for every handshake and the secret for every call, so that either is replaced
without a restart; streams that are open stay open. Unix sockets carry no TLS: their files' modes say who may
connect. The health service answers anybody who gets through the handshake.
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
    """What both ends of a stream ask of each other; by default nothing."""

    tls: TlsConfig | None = None
    """Both ends show a certificate of one authority."""
    secret_file: str | None = None
    """The client shows what is in this file."""

    @property
    def is_open(self) -> bool:
        """Whoever reaches the port is served."""
        return self.tls is None and self.secret_file is None

    def check(self) -> None:
        """Raises ConfigError naming the file that is missing or unfit."""
        if self.tls is not None:
            _read_certificates(self.tls)
        if self.secret_file is not None:
            read_secret(self.secret_file)

    def metadata(self) -> Metadata:
        """What a client sends with every call. Raises ConfigError when the secret cannot be read."""
        if self.secret_file is None:
            return ()
        return ((_METADATA_KEY, _SCHEME + read_secret(self.secret_file)),)

    async def admit(self, context: aio.ServicerContext[Any, Any]) -> None:
        """Returns for a peer that shows the secret; ends the call of another with UNAUTHENTICATED."""
        if self.secret_file is not None and not self._shows_secret(self.secret_file, context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the secret is missing or wrong")

    def _shows_secret(self, path: str, context: aio.ServicerContext[Any, Any]) -> bool:
        try:
            expected = (_SCHEME + read_secret(path)).encode()
        except ConfigError as error:
            logger.error("nobody is let in: %s", error)
            return False
        shown = [value for name, value in context.invocation_metadata() or () if name == _METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(_as_bytes(shown[0]), expected)


def read_secret(path: str) -> str:
    """The file's text without white space around it. Raises ConfigError; the secret is in no message."""
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
    """Of a connection that is made now. Raises ConfigError for a file that is missing or unfit."""
    files = _read_certificates(tls)
    return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Of a server whose clients must show a certificate; its own follows the files.

    Raises:
        ConfigError: a file is missing or unfit. Files that become so later are ignored until they are fit.
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
    """A server's certificates, as gRPC's handshakes ask for them."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._last = _read_certificates(tls)

    def first(self) -> grpc.ServerCertificateConfiguration:
        return self._last.configuration()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """New certificates, or None to keep the last ones; called by gRPC before every handshake."""
        try:
            files = _read_certificates(self._tls)
        except ConfigError as error:
            logger.error("the last certificates stay in use: %s", error)
            return None
        if files == self._last:
            return None
        self._last = files
        return files.configuration()


def _read_certificates(tls: TlsConfig) -> _Certificates:
    """Raises ConfigError for a file that is missing, no PEM, or a key that is not the certificate's."""
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
