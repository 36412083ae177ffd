"""Keys of a federation: a certificate authority, the server's TLS certificate, and a key pair for each node."""

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedobp.errors import FedobpError, short
from fedobp.files import unwritable

CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"
_DAYS = 825  # what TLS clients accept at most of a server's certificate


def make_keys(folder: Path, hosts: Sequence[str], nodes: int) -> None:
    """Write `ca.crt`, `server.pem`, `server.key`, and for each node `node-I` and `node-I.pub`.

    The authority signs one certificate, and its private key is not kept. Existing keys are never overwritten.
    """
    names = [_host(host) for host in hosts]
    if (folder / CA).exists():
        raise FedobpError(f"{short(folder, 200)} has keys already: remove them, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        authority = ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("fedobp federation", authority.public_key(), None, authority, [])
        key = ec.generate_private_key(ec.SECP256R1())
        server = _certificate("fedobp superlink", key.public_key(), ca, authority, names)
        _write(folder / CA, ca.public_bytes(serialization.Encoding.PEM))
        _write(folder / CERTIFICATE, server.public_bytes(serialization.Encoding.PEM))
        _write(folder / KEY, _private(key, serialization.PrivateFormat.PKCS8), secret=True)
        for node in range(nodes):
            make_node_key(folder / f"node-{node}")
    except OSError as error:
        raise unwritable(folder, error) from error


def make_node_key(path: Path) -> None:
    """Write a node's private key, and its public one beside it: P-384 in OpenSSH's format, as Flower wants it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(path.with_name(f"{path.name}.pub"), public + b"\n")


def _certificate(
    name: str,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[x509.GeneralName],
) -> x509.Certificate:
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    else:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only"), False,
        )  # fmt: skip
        signs = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage)
        made = made.add_extension(signs, critical=True)
    return made.sign(signer, hashes.SHA256())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name):
            raise FedobpError(
                f"'{short(name)}' is no name of a machine: give one such as a.example.org, or its IP address"
            ) from None
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file; a secret one is readable by its owner alone from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
