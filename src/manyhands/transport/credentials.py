"""The run's own key and self-signed certificate: whoever has them belongs to the run, nobody else is let in.

Made with `cryptography` (extra `hosts`), which is imported only here. A credentials file is PEM, mode 0600; the
variable MANYHANDS_CREDENTIALS names it. Both sides of a connection present the same certificate and accept no other
(TLS 1.3).
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from manyhands.errors import BadInput

VARIABLE = "MANYHANDS_CREDENTIALS"
VALID_DAYS = 30
_MOST_BYTES = 1 << 16
_KEYS = (b"PRIVATE KEY", b"EC PRIVATE KEY")  # an encrypted one would ask for its password at the terminal
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----[^-]+-----END \1-----\n?")


@dataclass(frozen=True, repr=False)
class Credentials:
    """Key and certificate of one run, PEM. Never shown: it has no repr of its own."""

    key: bytes
    certificate: bytes

    @classmethod
    def create(cls) -> Self:
        """A new P-256 key and its certificate, valid for VALID_DAYS. BadInput without `cryptography`."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise BadInput(
                "making a run's certificate needs the package cryptography: pip install 'manyhands[hosts]' "
                f"(or name a credentials file in {VARIABLE})"
            ) from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manyhands run")])
        now = datetime.now(UTC)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
        )
        builder = (
            x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # the hosts' clocks may differ
            .not_valid_after(now + timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # it vouches for itself
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        encoding = serialization.Encoding.PEM
        return cls(
            key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            builder.sign(key, hashes.SHA256()).public_bytes(encoding),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a file that nobody but this user (or root) can read or write. BadInput for any other, and when expired.

        The open file is judged, not its name: a link to such a file (a mounted secret) is as good, and cannot be
        swapped.
        """
        data = read_private(path)
        blocks = {match[1]: match[0] for match in _BLOCK.finditer(data)}
        key = next((block for kind, block in blocks.items() if kind in _KEYS), None)
        certificate = blocks.get(b"CERTIFICATE")
        if key is None or certificate is None:
            raise BadInput(
                f"{path} does not hold a private key and a certificate in PEM: copy the driver's file again, or name "
                "another file"
            )
        credentials = cls(key, certificate)
        try:
            (own,) = credentials.client_context().get_ca_certs()
        except (ssl.SSLError, ValueError) as error:
            raise BadInput(
                f"cannot use the key and certificate in {path}: {error}. Copy the driver's file again, or name another "
                "file"
            ) from error
        if ssl.cert_time_to_seconds(str(own["notAfter"])) < time.time():
            raise BadInput(
                f"the certificate in {path} expired on {own['notAfter']}: remove the file, and start the driver again, "
                "which makes new credentials"
            )
        return credentials

    @classmethod
    def from_environment(cls) -> Self | None:
        """What MANYHANDS_CREDENTIALS names; None where it is not set."""
        path = os.environ.get(VARIABLE)
        return cls.load(Path(path)) if path else None

    def save(self, path: Path) -> None:
        """Write a new file, mode 0600 from its first byte. BadInput where a file, or a dangling link, exists."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise BadInput(f"{path} exists: credentials are never written over; remove it or name another") from error
        except OSError as error:
            raise BadInput(f"cannot write credentials to {path}: {error.strerror}") from error
        with os.fdopen(fd, "wb") as file:
            file.write(self.key + self.certificate)

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes, and an unread ticket would turn a client's end into a reset
        return context

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def is_peer(self, sock: ssl.SSLSocket) -> bool:
        """Whether the other end of a finished handshake presented this very certificate."""
        theirs = sock.getpeercert(binary_form=True)
        return theirs is not None and hmac.compare_digest(theirs, ssl.PEM_cert_to_DER_cert(self.certificate.decode()))

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is the run's, whatever its hosts are called
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate.decode())
        fd = os.memfd_create("credentials", os.MFD_CLOEXEC)
        try:  # `ssl` reads a key only from a file: memory, so that the key reaches no disk
            os.write(fd, self.key + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def read_private(path: Path) -> bytes:
    """What a file of mode 0600 holds, at most 64 KB. BadInput for one that others may read or change."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo must not hold us up
    except OSError as error:
        raise BadInput(f"cannot read the credentials in {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise BadInput(
                f"{path} must be a file of user {os.geteuid()}, and it belongs to user {status.st_uid} or is not a "
                "file: copy it as this user"
            )
        if status.st_mode & 0o077:
            raise BadInput(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so other users can read or change it: run chmod "
                "600 on it, and make new credentials if somebody may have read them"
            )
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES)
    finally:
        os.close(fd)
