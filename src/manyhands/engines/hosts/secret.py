"""What makes a process a member of a run on several hosts: the credentials in the file that MANYHANDS_CREDENTIALS names.

With TLS that is a key and its certificate. Without, it is a token that both ends of a connection prove to hold, and
never send: any private file will do, the credentials' too.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from manyhands.errors import BadInput
from manyhands.transport.credentials import VARIABLE, Credentials, read_private

_LEAST_BYTES = 32


class Credential(TypedDict):
    """What `Listener` and `connect` want of it."""

    credentials: Credentials | None
    token: bytes | None


@dataclass(frozen=True, repr=False)
class Secret:
    """Never shown: it has no repr of its own."""

    credentials: Credentials | None = None
    token: bytes | None = None

    @classmethod
    def load(cls, path: Path, *, tls: bool) -> Secret:
        """BadInput for a file that others may read, or that does not hold what is needed."""
        if tls:
            return cls(credentials=Credentials.load(path))
        data = read_private(path)
        if len(data) < _LEAST_BYTES:
            raise BadInput(
                f"{path} is too short for a run's secret ({len(data)} bytes, and at least {_LEAST_BYTES} are needed): "
                "remove it, and start the driver again, which makes a new one"
            )
        return cls(token=hashlib.sha256(data).digest())

    @classmethod
    def create(cls, path: Path, *, tls: bool) -> Secret:
        """New ones, in a new file of mode 0600. Another host may wait for it on a shared disk: it appears whole.

        BadInput where there is no folder for it, and without `cryptography`.
        """
        folder = path.parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise BadInput(
                f"cannot write credentials to {path}: this user cannot write to the folder {folder}. Make the folder "
                "first, or name another file"
            )
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        if tls:
            Credentials.create().save(unfinished)
        else:
            Credentials(secrets.token_hex(32).encode(), b"\n").save(unfinished)
        unfinished.replace(path)
        return cls.load(path, tls=tls)

    @property
    def proof(self) -> Credential:
        return {"credentials": self.credentials, "token": self.token}

    def to_json(self) -> dict[str, str]:
        """For the processes of this host, over inherited sockets alone."""
        if self.credentials is not None:
            return {"key": self.credentials.key.decode(), "certificate": self.credentials.certificate.decode()}
        return {"token": (self.token or b"").hex()}

    @classmethod
    def from_json(cls, values: dict[str, str]) -> Secret:
        if "key" in values:
            return cls(credentials=Credentials(values["key"].encode(), values["certificate"].encode()))
        return cls(token=bytes.fromhex(values["token"]))


def named_file() -> Path | None:
    """What MANYHANDS_CREDENTIALS names, whether or not it is there."""
    text = os.environ.get(VARIABLE)
    return Path(text).absolute() if text else None
