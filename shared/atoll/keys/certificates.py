"""A small authority of the operator's own: it vouches for the brokers, and its certificate goes into every identity.

A broker's certificate says under which names and addresses it is reached. Clients trust this one authority and no other, so
a stranger's broker with a certificate of a public authority is refused, too. Whoever has an authority already brings its own
certificates: the folder of keys holds plain PEM files.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS: Final = 3650
BROKER_DAYS: Final = 825
_SKEW: Final = timedelta(hours=1)
"""Clocks of machines differ: a certificate holds from a little before it is made."""


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate and its private key, as PEM texts."""

    certificate: str
    key: str


def new_authority(name: str) -> Certified:
    """Return an authority that signs certificates of brokers and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _begun(subject, subject, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate, key)


def broker_certificate(authority: Certified, hosts: Sequence[str], days: int = BROKER_DAYS) -> Certified:
    """Return a broker's certificate for `hosts` (names and IP addresses), signed by `authority`."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    signer = serialization.load_pem_private_key(authority.key.encode(), password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise TypeError("an authority of ours has an elliptic-curve key")
    certificate = (
        _begun(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_reached(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate, key)


def days_left(certificate: str) -> float:
    """Return for how many days a certificate still holds."""
    until = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc
    return (until - datetime.now(UTC)) / timedelta(days=1)


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _reached(host: str) -> x509.GeneralName:
    """Return a name or an address as a certificate holds it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certified:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certified(certificate.public_bytes(serialization.Encoding.PEM).decode(), secret.decode())
