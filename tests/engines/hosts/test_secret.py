from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.engines.hosts.secret import Secret
from manyhands.errors import BadInput


def test_both_ends_derive_the_same_token(tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    made = Secret.create(path, tls=False)
    assert made == Secret.load(path, tls=False)
    assert made.credentials is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pem"]
    with pytest.raises(BadInput, match="does not hold a private key"):
        Secret.load(path, tls=True)


def test_a_file_made_for_tls_will_do_without(tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    Secret.create(path, tls=True)
    assert Secret.load(path, tls=False).token is not None


def test_a_short_secret_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(BadInput, match="too short for a run's secret .5 bytes, and at least 32"):
        Secret.load(path, tls=False)


def test_without_a_folder_for_it_the_file_that_was_asked_for_is_named(tmp_path: Path) -> None:
    path = tmp_path / "not there" / "run.pem"
    for tls in (True, False):
        with pytest.raises(
            BadInput, match=r"cannot write credentials to .*/not there/run\.pem: .* Make the folder first"
        ):
            Secret.create(path, tls=tls)
