"""Signs webhooks as PayPal does, with a certificate of the stub's own authority."""

from __future__ import annotations

import base64
import hashlib
import zlib
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAME = "messageverificationcerts.stub.invalid"
_VALID_FOR = timedelta(days=365)


def make_authority() -> tuple[rsa.RSAPrivateKey, x509.Certificate]:
    """A new root: its key and its certificate."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "PayPal (stand-in) root")])
    return key, _certificate(name, name, key.public_key(), key, authority=True)


def make_certificate(
    authority: tuple[rsa.RSAPrivateKey, x509.Certificate],
    *,
    name: str = NAME,
    starts: datetime | None = None,
) -> tuple[rsa.RSAPrivateKey, bytes]:
    """A key and its PEM certificate for `name`, valid for a year from `starts` (yesterday)."""
    root_key, root = authority
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    leaf = _certificate(subject, root.subject, key.public_key(), root_key, name=name, starts=starts)
    return key, leaf.public_bytes(serialization.Encoding.PEM)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: rsa.RSAPublicKey,
    signed_by: rsa.RSAPrivateKey,
    *,
    authority: bool = False,
    name: str = "",
    starts: datetime | None = None,
) -> x509.Certificate:
    starts = starts or datetime.now(UTC) - timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(starts + _VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by.public_key()), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority, key_cert_sign=authority, crl_sign=authority,
                content_commitment=False, key_encipherment=False, data_encipherment=False,
                key_agreement=False, encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
    )  # fmt: skip
    if not authority:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
        ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signed_by, hashes.SHA256())


class Signer:
    """`authority_pem` is what the merchant has to trust, `certificate_pem` what the certificate's address gives."""

    def __init__(self) -> None:
        authority = make_authority()
        self.authority_pem = authority[1].public_bytes(serialization.Encoding.PEM)
        self._key, self.certificate_pem = make_certificate(authority)
        # Another certificate has another address, as merchants keep them by address.
        self.certificate_id = f"CERT-{hashlib.sha256(self.certificate_pem).hexdigest()[:24]}"

    def sign(self, *, transmission_id: str, transmission_time: str, webhook_id: str, body: bytes) -> str:
        signed = f"{transmission_id}|{transmission_time}|{webhook_id}|{zlib.crc32(body)}".encode()
        return base64.b64encode(self._key.sign(signed, padding.PKCS1v15(), hashes.SHA256())).decode()

    def write_authority(self, folder: Path) -> None:
        """Where the merchant's setting PAYPAL_STUB_CA looks for it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.pem").write_bytes(self.authority_pem)


@lru_cache(maxsize=1)
def signer() -> Signer:
    """One for the process: making keys is slow."""
    return Signer()
