"""Checkpoints on disk: written whole or not at all, verified before they are believed.

A checkpoint is a folder `step-00000120/` of one safetensors and one JSON file a rank, and `manifest.json`, written
last, with every file's SHA-256. It is made under a temporary name, synced, then renamed. The newest two are kept;
those newer than the one being saved were passed over at resume, because they are damaged, and are removed.

Elsewhere than on a disk (a `RemotePath`) nothing can be renamed into place, and every rank puts its own files where they
are to lie: there a folder without a manifest is not finished, and no checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.errors import BadInput, ManyhandsError
from manyhands.remote_path import AnyPath, RemotePath, path_of

KEPT = 2
FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `ranks` files of each kind."""

    path: AnyPath
    tick: int
    ranks: int

    def tensors(self, rank: int) -> dict[str, Tensor]:
        return load_tensors(self.path / f"rank-{rank:05d}.safetensors")

    def values(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.path / f"rank-{rank:05d}.json").read_text()))


def load_tensors(path: AnyPath) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises OSError, SafetensorError."""
    if isinstance(path, RemotePath):
        return safetensors.torch.load(path.read_bytes())
    return safetensors.torch.load_file(path)


def save(folder: AnyPath, tick: int, group: Group, tensors: dict[str, Tensor], values: dict[str, Any]) -> AnyPath:
    """Write this rank's part of a checkpoint; a collective. Returns where it lies, the same on all ranks.

    A rank on a host that does not see rank 0's folder on a disk sends its part there. OSError (a full disk, say) and a
    RemotePath's ManyhandsError pass through: no checkpoint under the final name exists then.
    """
    final = folder / _name(tick)
    begun = str(_begin(folder, tick)) if group.rank == 0 else ""
    partial = path_of(group.all_gather_json(begun)[0])
    digests = _write_parts(partial, group, _files(group.rank, tensors, values))
    if group.rank == 0:
        manifest = {"format": FORMAT, "tick": tick, "ranks": group.size, "sha256": digests}
        _finish(partial, final, json.dumps(manifest, indent=1).encode())
        discard_newer(folder, tick)
        for old in _folders(folder)[:-KEPT]:
            _remove(old)
    group.barrier()
    return final


@contextmanager
def within_reach(saved: Checkpoint, group: Group) -> Iterator[Checkpoint]:
    """The checkpoint as this rank can read it, within; a collective.

    Hosts that do not see rank 0's disk get a copy of it from there, which is gone afterwards.
    """
    if isinstance(saved.path, RemotePath):
        yield saved
        return
    own = _digest_of(saved.path / MANIFEST)
    digests = group.all_gather_json(own)
    if len(set(digests)) == 1:
        yield saved
        return
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        names = sorted(path.name for path in saved.path.iterdir()) if group.rank == 0 else []
        for name in group.all_gather_json(names)[0]:
            data = _from_rank_0(group, (saved.path / name).read_bytes() if group.rank == 0 else b"")
            if own != digests[0]:
                (Path(folder) / name).write_bytes(data)
        yield saved if own == digests[0] else replace(saved, path=Path(folder))


def discard_newer(folder: AnyPath, tick: int) -> None:
    """Remove checkpoints newer than `tick`, at which a run goes on: `newest` passed them over, and they must not count as kept."""
    for path in _folders(folder):
        if _tick(path) > tick:
            _remove(path)


def newest(folder: AnyPath, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose every file is what its manifest says; each damaged one is named to `warn`.

    None where there is no checkpoint at all; BadInput where there are some and all are damaged. A file system that does not
    answer is no damage (ManyhandsError).
    """
    folders = _folders(folder)
    for path in reversed(folders):
        try:
            return _verified(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as problem:
            warn(f"checkpoint {path} is damaged and left out: {problem}")
    if folders:
        raise BadInput(f"all {len(folders)} checkpoints in {folder} are damaged: start again in another run directory")
    return None


def _name(tick: int) -> str:
    return f"step-{tick:08d}"


def _folders(folder: AnyPath) -> list[AnyPath]:
    """All checkpoints, oldest first; not what has another name (a copy of the user's), which is never removed."""
    if isinstance(folder, RemotePath):
        return [path for path in _remote_folders(folder) if (path / MANIFEST).exists()]
    return sorted((path for path in folder.glob("step-*") if path.is_dir() and _tick(path) >= 0), key=_tick)


def _remote_folders(folder: RemotePath) -> list[RemotePath]:
    """The same, finished or not."""
    return sorted((path for path in folder.iterdir() if _tick(path) >= 0), key=_tick)


def _tick(path: AnyPath) -> int:
    """-1: it has another name."""
    step, _, number = path.name.partition("-")
    return int(number) if step == "step" and number.isdecimal() else -1


def _verified(path: AnyPath) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']}, this version reads {FORMAT}")
    for name, digest in manifest["sha256"].items():
        with (path / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise ValueError(f"{name} is not what was written")
    return Checkpoint(path, manifest["tick"], manifest["ranks"])


def _begin(folder: AnyPath, tick: int) -> AnyPath:
    """An empty folder, with a name that no other host has by chance; elsewhere the final one, once what was never finished is gone."""
    if isinstance(folder, RemotePath):
        final = folder / _name(tick)
        for path in _remote_folders(folder):
            if path == final or not (path / MANIFEST).exists():
                _remove(path)
        final.mkdir()
        return final
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.partial"):
        shutil.rmtree(old)
    partial = (folder / f"{_name(tick)}.{secrets.token_hex(4)}.partial").absolute()
    partial.mkdir()
    return partial


def _files(rank: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, bytes]:
    own = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }  # a view would save all its storage
    return {
        f"rank-{rank:05d}.safetensors": safetensors.torch.save(own),
        f"rank-{rank:05d}.json": json.dumps(values).encode(),
    }


def _finish(partial: AnyPath, final: AnyPath, manifest: bytes) -> None:
    """Make a checkpoint of a folder that has all parts, by its manifest and its name."""
    if isinstance(partial, RemotePath) or isinstance(final, RemotePath):
        write_whole(final / MANIFEST, manifest)
        return
    _write_synced(partial / MANIFEST, manifest)
    _sync_folder(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(final.parent)


def _remove(path: AnyPath) -> None:
    if isinstance(path, RemotePath):
        path.remove()
    else:
        shutil.rmtree(path)


def _write_parts(partial: AnyPath, group: Group, files: dict[str, bytes]) -> dict[str, str]:
    """Every rank's files, written where the folder is seen; the digests of all."""
    if isinstance(partial, RemotePath):
        return _put_parts(partial, group, files)
    seen = partial.is_dir()
    for name, data in files.items() if seen else ():
        _write_synced(partial / name, data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    everyone = group.all_gather_json([digests, {} if seen else {name: len(data) for name, data in files.items()}])
    for rank, (_, sizes) in enumerate(everyone):
        for name, size in sizes.items():
            if group.rank == rank:
                group.send(_tensor_of(files[name]), 0)
            elif group.rank == 0:
                came = torch.empty(size, dtype=torch.uint8)
                group.receive_(came, rank)
                _write_synced(partial / name, came.numpy().tobytes())
    return {name: digest for part, _ in everyone for name, digest in part.items()}


def _put_parts(folder: RemotePath, group: Group, files: dict[str, bytes]) -> dict[str, str]:
    """The same elsewhere, each rank on its own. Raises ManyhandsError where rank 0 does not find there what another put."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    own = {name: [hashlib.sha256(data).hexdigest(), len(data)] for name, data in files.items()}
    everyone = group.all_gather_json(own)
    found = folder.sizes() if group.rank == 0 else {}
    for rank, part in enumerate(everyone if group.rank == 0 else ()):
        for name, (_, size) in part.items():
            if found.get(name) != size:
                raise ManyhandsError(
                    f"worker {rank} put {name} of {size} bytes into {folder}, and worker 0 finds {found.get(name, 'none')} there: "
                    "give a run directory (run_dir=, --run-dir) that is one and the same place for all hosts"
                )
    return {name: digest for part in everyone for name, (digest, _) in part.items()}


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _from_rank_0(group: Group, data: bytes) -> bytes:
    size = group.all_gather_json(len(data))[0]
    tensor = _tensor_of(data) if group.rank == 0 else torch.empty(size, dtype=torch.uint8)
    if size:
        group.broadcast_(tensor, 0)
    return tensor.numpy().tobytes()


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: AnyPath, data: bytes) -> None:
    """Write a file so that it holds all of `data`, synced, or is not there (OSError; a RemotePath's ManyhandsError)."""
    if isinstance(path, RemotePath):
        path.write_whole(io.BytesIO(data))
        return
    partial = path.with_name(path.name + ".partial")
    try:
        _write_synced(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
