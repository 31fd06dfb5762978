"""A run's key and certificate: files that are the owner's alone, and TLS with nobody else."""

import contextlib
import os
import ssl
import sys
from datetime import UTC, datetime

import pytest
from cryptography import x509
from socket_pairs import aside, credentials, tcp_pair

from manyhands.transport.credentials import VARIABLE, Credentials
from refusals import refused


@pytest.fixture
def path(tmp_path):
    credentials().save(tmp_path / "run.pem")
    return tmp_path / "run.pem"


def test_saved_and_loaded(path, monkeypatch):
    assert path.stat().st_mode & 0o777 == 0o600
    assert Credentials.load(path) == credentials()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Credentials.from_environment() is None
    monkeypatch.setenv(VARIABLE, str(path))
    assert Credentials.from_environment() == credentials()


def test_the_certificate_is_bounded_in_time_and_the_key_is_never_shown(tmp_path, monkeypatch):
    made = x509.load_pem_x509_certificate(credentials().certificate)
    assert (made.not_valid_after_utc - datetime.now(UTC)).days in (29, 30)
    assert (datetime.now(UTC) - made.not_valid_before_utc).days == 1
    assert Credentials.create().key != credentials().key
    assert "PRIVATE" not in repr(credentials())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files, create = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *given: files.append(create(*given)) or files[-1])
    credentials().server_context()
    assert files
    for fd in files:
        refused("Bad file descriptor", os.fstat, fd, kind=OSError)
    assert not list(tmp_path.iterdir())


def test_a_file_that_others_reach_and_a_link_is_judged_by_its_file(path, tmp_path):
    link = tmp_path / "link.pem"
    link.symlink_to(path)
    assert Credentials.load(link) == credentials()
    for mode in (0o640, 0o604, 0o660, 0o666, 0o602):
        path.chmod(mode)
        for file in (path, link):
            refused(f"has mode {mode:04o}", Credentials.load, file)


def test_a_file_of_somebody_else(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if path.stat().st_uid == 0:
        os.chown(path, 54321, -1)
    refused("a file of user 12345", Credentials.load, path)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "", "missing"):
        refused("", Credentials.load, tmp_path / name)


def _expired() -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key(credentials().key, None)
    made = x509.load_pem_x509_certificate(credentials().certificate)
    builder = x509.CertificateBuilder(made.issuer, made.subject, key.public_key(), made.serial_number)
    builder = builder.not_valid_before(datetime(2020, 1, 1, tzinfo=UTC)).not_valid_after(
        datetime(2020, 2, 1, tzinfo=UTC)
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _locked() -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(credentials().key, None)
    lock = serialization.BestAvailableEncryption(b"secret")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def test_a_file_that_holds_something_else_and_nothing_is_written_over(path, tmp_path):
    ours = credentials()
    for content, message in [
        (b"", "does not hold"),
        (b"\xff" * 100_000, "does not hold"),
        (ours.key, "does not hold"),
        (ours.certificate, "does not hold"),
        (_locked() + ours.certificate, "does not hold"),  # OpenSSL would ask at the terminal
        (Credentials.create().key + ours.certificate, "cannot use the key and certificate"),
        (ours.key + ours.certificate.replace(b"MII", b"MIJ"), "cannot use the key and certificate"),
        (ours.key + _expired(), "expired on Feb  1"),
    ]:
        path.write_bytes(content)
        refused(message, Credentials.load, path, case=content)
    (tmp_path / "dangling").symlink_to(tmp_path / "target")
    for name, message in (("run.pem", "exists"), ("dangling", "exists"), ("no folder/run.pem", "cannot write")):
        refused(message, ours.save, tmp_path / name)


def test_without_cryptography(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    refused(r"manyhands\[hosts\]", Credentials.create)


def _shake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    near, far = tcp_pair()
    near.settimeout(5)
    far.settimeout(5)
    with near, far:
        other = aside(lambda: server.wrap_socket(far, server_side=True))
        near = client.wrap_socket(near)
        try:
            with contextlib.suppress(ConnectionError):  # it may be refused, and closed, already
                near.sendall(b"x")  # a TLS 1.3 client believes in the connection before it was judged
            return near, other.result(5)
        finally:
            near.close()
            other.exception(5) or other.result().close()


def test_the_same_certificate_on_both_sides():
    near, far = tcp_pair()
    with near, far:
        ours = credentials()
        other = aside(lambda: ours.server_context().wrap_socket(far, server_side=True))
        with ours.client_context().wrap_socket(near) as near, other.result(5) as far:
            assert near.version() == "TLSv1.3"
            assert ours.is_peer(near)
            assert ours.is_peer(far)
            assert not Credentials.create().is_peer(near)


def _nobody() -> ssl.SSLContext:
    context = credentials().client_context()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    assert context.verify_mode == ssl.CERT_REQUIRED
    return bare


def _old() -> ssl.SSLContext:
    context = credentials().client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def test_strangers_are_refused_by_both_sides():
    for client in (Credentials.create().client_context(), _nobody(), _old()):
        refused("", _shake, client, credentials().server_context(), kind=ssl.SSLError)
    stranger = Credentials.create().server_context()
    stranger.verify_mode = ssl.CERT_NONE
    refused("", _shake, credentials().client_context(), stranger, kind=ssl.SSLCertVerificationError)
