"""Certificates of a new authority: one for a server, one for a client."""

import datetime as dt
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """A server and a client certificate, signed by `authority`."""

    authority: Pair
    server: Pair
    client: Pair

    def demanding(self) -> ssl.SSLContext:
        """The context of a server that requires a client certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.authority.cert))
        context.load_cert_chain(self.server.cert, self.server.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def certificates(home: Path, names: Sequence[str] = ()) -> Certificates:
    """Create certificates in `home`, valid for a day, for 127.0.0.1 and these host names."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("authority")
    root = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
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
    authority = root.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    address = x509.SubjectAlternativeName([here, *(x509.DNSName(name) for name in names)])
    pairs = [_written(home, "authority", authority, key)]
    for title in ("server", "client"):
        own = ec.generate_private_key(ec.SECP256R1())
        signed = _builder(_name(title), name, own).add_extension(address, critical=False).sign(key, hashes.SHA256())
        pairs.append(_written(home, title, signed, own))
    return Certificates(*pairs)


def _name(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
    )


def _written(home: Path, title: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pair = Pair(home / f"{title}.pem", home / f"{title}-key.pem")
    pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return pair
