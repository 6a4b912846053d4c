"""Certificate authorities and certificates for tests."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from specray.config import TlsConfig

WORKER_NAME = "specray-worker"


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA that signs certificates for 127.0.0.1 and ``WORKER_NAME``."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(_sign(name, key, x509.Name(_name(name)), key, is_authority=True), key)

    def write(self, directory: Path, *, trusts: Authority | None = None, **tls: str) -> TlsConfig:
        """Writes a new certificate of this CA, and the CA to trust; returns their configuration."""
        directory.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign("peer", key, self.certificate.subject, self.key)
        paths = {name: directory / f"{name}.pem" for name in ("ca", "cert", "key")}
        paths["ca"].write_bytes((trusts or self).certificate.public_bytes(serialization.Encoding.PEM))
        paths["cert"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths["key"].write_bytes(_pem(key))
        return TlsConfig(**{name: str(path) for name, path in paths.items()}, **tls)


def _name(name: str) -> list[x509.NameAttribute[str]]:
    return [x509.NameAttribute(NameOID.COMMON_NAME, name)]


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = [x509.DNSName(WORKER_NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name(_name(name)))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
