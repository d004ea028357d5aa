"""Makes a certificate authority and the certificates of servers, which live as long as the directory of a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """The files of a server: its certificate and its private key."""

    certificate: Path
    key: Path


class Authority:
    """An authority of its own; `file` holds the certificate that clients trust."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._key, self._name = directory, ec.generate_private_key(ec.SECP256R1()), _name("Test CA")
        self.file = directory / "ca.pem"
        self.file.write_bytes(self._signed(self._name, self._key.public_key(), authority=True))

    def certify(self, host: str) -> Pair:
        """Returns the files of a server that clients call by the name `host`, and by no other."""
        key, pair = ec.generate_private_key(ec.SECP256R1()), Pair(*self._paths(host))
        pair.certificate.write_bytes(self._signed(_name(host), key.public_key(), host=host))
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair

    def _paths(self, host: str) -> tuple[Path, Path]:
        return self._directory / f"{host}.pem", self._directory / f"{host}.key"

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, host: str = "", authority: bool = False
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=name, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if host:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])
