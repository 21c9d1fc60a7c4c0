"""A small authority of the operator's own: it vouches for the brokers, and its certificate goes into every identity.

Clients trust this one authority and no other, so a stranger's broker with a certificate of a public authority is refused, too.
An operator who has an authority already brings its own certificates: the folder of keys holds plain PEM files. The nodes of a
cluster show each other the same certificate, on both ends of a connection, so it also serves as a client's.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.base.errors import SettingsError

E = TypeVar("E", bound=x509.ExtensionType)
AUTHORITY_DAYS: Final = 3650
BROKER_DAYS: Final = 825
WARN_DAYS: Final = 30
"""A broker and a doctor warn of a certificate that has fewer days left."""
_BOTH_ENDS: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_COMMON_NAME_MAX: Final = 64
"""X.509 allows no longer one. It tells people whose certificate it is; clients look at the names of hosts."""
_HOST: Final = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)
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
    subject = _x509_name(name)
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
        _builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate, key)


def broker_certificate(authority: Certified, hosts: Sequence[str], days: int = BROKER_DAYS) -> Certified:
    """Return a broker's certificate for `hosts`; raise `ValueError` if the `authority` is damaged, or its key another kind."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = _key_of(authority)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind than ours")  # noqa: TRY004  (a file is wrong, not a caller)
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    certificate = (
        _builder(_x509_name(hosts[0]), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_BOTH_ENDS), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate, key)


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise `SettingsError` for what is neither a host name nor an address."""
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not _HOST.fullmatch(host):
                raise SettingsError(
                    "this is no name of a host",
                    got=repr(host),
                    allowed="a name (hub.example.org) or an IP address",
                    todo="correct --host",
                ) from None


def check_shown(shown: Certified, now_s: float) -> None:
    """Raise `ValueError` unless a server can show this certificate: it has not ended, and the key is its own."""
    _key_of(shown)
    if now_s >= ends_at_s(shown.certificate):
        raise ValueError("the certificate has ended")


def check_authority(certificate: str) -> None:
    """Raise `ValueError` unless this is the certificate of an authority; an empty text would mean every public one."""
    x509.load_pem_x509_certificate(certificate.encode())


def begins_at_s(certificate: str) -> float:
    """Return from when on a certificate holds, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate.encode()).not_valid_before_utc.timestamp()


def ends_at_s(certificate: str) -> float:
    """Return until when a certificate holds, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc.timestamp()


def hosts_of(certificate: str) -> tuple[str, ...]:
    """Return the names and addresses of hosts in a certificate."""
    names = _extension(certificate, x509.SubjectAlternativeName)
    if names is None:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))


def serves_nodes(certificate: str) -> bool:
    """Return whether the nodes of a cluster may show a certificate to each other, as servers and as clients."""
    uses = _extension(certificate, x509.ExtendedKeyUsage)
    return uses is None or set(_BOTH_ENDS) <= set(uses)


def _extension(certificate: str, kind: type[E]) -> E | None:
    try:
        return x509.load_pem_x509_certificate(certificate.encode()).extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def pin(certificate: str) -> str:
    """Return what nats-server calls the pin of a certificate: SHA-256 of its public key, in hex."""
    return hashlib.sha256(_public_bytes(x509.load_pem_x509_certificate(certificate.encode()).public_key())).hexdigest()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
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


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_MAX])])


def _key_of(certified: Certified) -> PrivateKeyTypes:
    certificate = x509.load_pem_x509_certificate(certified.certificate.encode())
    try:
        key = serialization.load_pem_private_key(certified.key.encode(), password=None)
    except TypeError:
        raise ValueError("the key is encrypted") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("the key is damaged") from None  # the library's words are long and say no more
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise ValueError("the certificate is of another key")
    return key


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certified:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certified(certificate.public_bytes(serialization.Encoding.PEM).decode(), secret.decode())
