"""Checkpoints on disk: written whole or not at all, verified before they are believed.

A checkpoint is a folder `step-00000120/` of one safetensors and one JSON file a rank, and `manifest.json`, written
last, with every file's SHA-256. It is made under a temporary name, synced, then renamed. The newest two are kept;
those newer than the one being saved were passed over at resume, because they are damaged, and are removed.

A manifest also has the number of the launch that wrote it (see `launch_lock`). What lies in the folder under other
names than a checkpoint's is neither read nor removed.

Elsewhere than on a disk (a `RemotePath`) nothing can be renamed into place, and every rank puts its own files where
they are to lie: there a folder without a manifest is not finished, and no checkpoint.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from typing_extensions import override

from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.paths import PARTIAL, AnyPath, RemotePath, open_regular
from manyhands.comm.group import Group
from manyhands.errors import BadInput, ManyhandsError, is_whole
from manyhands.rank_files.folder import as_given

KEPT = 2
FORMAT = 3
MANIFEST = "manifest.json"
_TOKEN_BYTES = 8
_MOST_TIMES, _MOST_MORE_BYTES = 8, 64 << 20  # how long another rank's file may be, see `_write_parts`
_PIECE_BYTES = 64 << 20
_WRITTEN_BYTES = 8 << 20  # at once, see `write_pieces`
_NAME = re.compile(r"step-[0-9]{8,18}")
_UNFINISHED = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.partial")
_DAMAGE = (OSError, ValueError, RecursionError)  # what reading a damaged file raises

Warn = Callable[[str], None]
Piece = bytes | memoryview  # of a file


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint, as whoever wrote or verified it says."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `ranks` files of each kind. `parts`: all its files but the manifest, by name."""

    path: AnyPath
    tick: int
    ranks: int
    parts: dict[str, CheckpointFile] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of all parts."""
        return hashlib.sha256("".join(part.sha256 for part in self.parts.values()).encode()).hexdigest()

    def tensors(self, rank: int) -> dict[str, Tensor]:
        return load_tensors(self.path / names_of(rank)[0])

    def reader(self, rank: int) -> SavedTensors:
        """The same, read one by one."""
        return SavedTensors(self.path / names_of(rank)[0])

    def values(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.path / names_of(rank)[1]).read_text()))


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, each read when it is asked for; of a file elsewhere all are, at first."""

    def __init__(self, path: AnyPath) -> None:
        self.bytes_read = 0
        self._read: Callable[[str], Tensor]
        self._shape: Callable[[str], tuple[int, ...]]
        if isinstance(path, RemotePath):
            loaded = load_tensors(path)
            self.bytes_read = sum(tensor.nbytes for tensor in loaded.values())
            self._names, self._read = list(loaded), loaded.__getitem__
            self._shape = lambda name: tuple(loaded[name].shape)
        else:
            file: Any = safetensors.safe_open(path, framework="pt")
            self._names, self._read = list(file.keys()), file.get_tensor
            self._shape = lambda name: tuple(file.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._read(name)
        self.bytes_read += tensor.nbytes
        return tensor

    def under(self, prefix: str) -> SavedTensors:
        """Those whose names begin with the prefix, by the rest of their names."""
        part = copy.copy(self)
        part._names = [name.removeprefix(prefix) for name in self._names if name.startswith(prefix)]
        part._read, part._shape = lambda name: self[prefix + name], lambda name: self._shape(prefix + name)
        part.bytes_read = 0
        return part

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name; no tensor is read for it."""
        return {name: self._shape(name) for name in self._names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_tensors(path: AnyPath) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises OSError, SafetensorError."""
    if isinstance(path, RemotePath):
        return safetensors.torch.load(path.read_bytes())
    return safetensors.torch.load_file(path)


@as_given()  # a part is no file of the script's
def save(
    folder: AnyPath,
    tick: int,
    group: Group,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    *,
    claim: Claim | None = None,
    warn: Warn = lambda message: None,
) -> AnyPath:
    """Write this rank's part of a checkpoint; a collective. Returns where it lies, the same on all ranks.

    claim: the launch that writes; ManyhandsError where another has the run directory by now. warn: gets a message about
        what cannot be removed.
    A rank on a host that does not see rank 0's folder on a disk sends its part there. OSError (a full disk, say) and a
    RemotePath's ManyhandsError pass through: no checkpoint under the final name exists then.

    No rank writes where another one chooses: every rank knows `folder` and the names of all files, and takes from
    the others a random token, lengths within bounds, and digests. ManyhandsError for anything else.
    """
    token = begin(folder, tick, claim, warn) if group.rank == 0 else ""
    partial = partial_of(folder, tick, group.all_gather_json(token)[0])
    contents = pieces_of(tensors), [json.dumps(values).encode()]
    parts = _write_parts(partial, group, dict(zip(names_of(group.rank), contents, strict=True)))
    if group.rank == 0:
        finish(folder, tick, partial, group.size, parts, claim, warn)
    group.barrier()
    return folder / _name(tick)


def begin(folder: AnyPath, tick: int, claim: Claim | None, warn: Warn) -> str:
    """Make the empty folder `partial_of`; its token. On a URL it is the final folder, cleared of unfinished files."""
    if claim is not None:
        claim.check()
    token = secrets.token_hex(_TOKEN_BYTES)
    partial = partial_of(folder, tick, token)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old == partial or _is_unfinished(old):
            remove(old, warn)
    partial.mkdir()
    return token


def remove_unfinished(folder: AnyPath, warn: Warn) -> None:
    """What interrupted saves left behind, where nobody saves any more."""
    for old in folder.iterdir():
        if _is_unfinished(old):
            remove(old, warn)


def partial_of(folder: AnyPath, tick: int, token: object) -> AnyPath:
    """Where the parts are written: on a disk a folder whose token no other host's folder has by chance. ManyhandsError
    for a token that `begin` does not give."""
    if not (isinstance(token, str) and re.fullmatch(f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}", token)):
        raise ManyhandsError(
            f"worker 0 sent {token!r:.80} as the name of a new checkpoint, which is not valid: install the same "
            "version of manyhands on all hosts"
        )
    return folder / (_name(tick) if isinstance(folder, RemotePath) else f"{_name(tick)}.{token}.partial")


def finish(
    folder: AnyPath,
    tick: int,
    partial: AnyPath,
    ranks: int,
    parts: dict[str, CheckpointFile],
    claim: Claim | None,
    warn: Warn,
) -> AnyPath:
    """Make a checkpoint of a folder that has all parts, by its manifest and its name; remove those that are too old."""
    final = folder / _name(tick)
    digests = {name: part.sha256 for name, part in parts.items()}
    manifest: dict[str, Any] = {"format": FORMAT, "tick": tick, "ranks": ranks, "sha256": digests}
    if claim is not None:
        claim.check()  # writing the parts took its time
        manifest["launch"] = claim.number
    _write_manifest(partial, final, json.dumps(manifest, indent=1).encode(), warn)
    discard_newer(folder, tick, warn)
    for old in _folders(folder)[:-KEPT]:
        remove(old, warn)
    return final


@contextmanager
def within_reach(saved: Checkpoint, group: Group) -> Iterator[Checkpoint]:
    """The checkpoint as this rank can read it, within; a collective.

    Hosts that do not see its folder get a copy from the first rank that does, which is gone afterwards. What comes has
    to be what `saved` says (ManyhandsError).
    """
    seen = _holds(saved)
    everyone = group.all_gather_json([seen, saved.tick, saved.digest])
    if any(said[1:] != everyone[0][1:] for said in everyone):
        ticks = ", ".join(str(said[1])[:20] for said in everyone)
        raise ManyhandsError(
            f"the workers found different checkpoints (steps by rank: {ticks}): give a run directory (run_dir=, "
            "--run-dir) that all hosts share"
        )
    where = [said[0] for said in everyone]
    if all(where):
        yield saved
        return
    if not any(where):
        raise BadInput(
            f"no host of this run can read the checkpoint {saved.path}: resume on the host that has this folder, or "
            "give a run directory (run_dir=, --run-dir) that all hosts share"
        )
    source = where.index(True)
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        for name, part in saved.parts.items():
            copy = Path(os.devnull) if seen else Path(folder) / name
            with (saved.path / name).open("rb") if group.rank == source else copy.open("wb") as file:
                _bring(group, file, name, part, source, target=None)
        yield saved if seen else replace(saved, path=Path(folder))


def discard_newer(folder: AnyPath, tick: int, warn: Warn = lambda message: None) -> None:
    """Remove checkpoints newer than `tick`, where the run resumes: `newest` rejected them, and they must not count."""
    for path in _folders(folder):
        if _tick(path) > tick:
            remove(path, warn)


def newest(folder: AnyPath, warn: Warn) -> Checkpoint | None:
    """The newest checkpoint whose every file is what its manifest says; each damaged one is named to `warn`.

    Of two launches at once, on a file system without locks, the later launch's is the newer one. None where there is no
    checkpoint at all; BadInput where there are some and all are damaged. A file system that does not answer is no
    damage (ManyhandsError).
    """
    folders = _folders(folder)
    for path in sorted(folders, key=lambda path: (_launch(path), _tick(path)), reverse=True):
        try:
            manifest, parts = _manifest(path), {}
            for name, digest in manifest["sha256"].items():
                with open_regular(path / name) as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    parts[name] = CheckpointFile(file.tell(), found)
                if found != digest:
                    raise ValueError(f"{name} was changed or cut off after it was written (its SHA-256 differs)")
            return Checkpoint(path, manifest["tick"], manifest["ranks"], parts)
        except (*_DAMAGE, SafetensorError) as problem:
            warn(f"checkpoint {path} is damaged, so it is ignored: {problem}")
    if folders:
        raise BadInput(f"every checkpoint in {folder} is damaged: start again in another run directory")
    return None


def last_launch(folder: AnyPath) -> int:
    """The largest number of a launch that a manifest has; 0 where none has one."""
    return int(max((number for path in _folders(folder) if (number := _launch(path)) < math.inf), default=0))


def _launch(path: AnyPath) -> float:
    """The number of the launch that wrote this checkpoint; infinite where its manifest is damaged."""
    try:
        return int(_manifest(path).get("launch", 0))
    except _DAMAGE:
        return math.inf


def _name(tick: int) -> str:
    return f"step-{tick:08d}"


def _folders(folder: AnyPath) -> list[AnyPath]:
    """All checkpoints, oldest first; not what has another name (a copy of the user's), which is never removed."""
    listed = folder.iterdir() if isinstance(folder, RemotePath) else filter(Path.is_dir, folder.glob("step-*"))
    return sorted((path for path in listed if _tick(path) >= 0 and not _is_unfinished(path)), key=_tick)


def _is_unfinished(path: AnyPath) -> bool:
    """Whether it is what an interrupted `save` left behind."""
    if isinstance(path, RemotePath):
        return _tick(path) >= 0 and not (path / MANIFEST).exists()
    return _UNFINISHED.fullmatch(path.name) is not None


def _tick(path: AnyPath) -> int:
    """-1: it has another name."""
    return int(path.name.removeprefix("step-")) if _NAME.fullmatch(path.name) else -1


def _manifest(path: AnyPath) -> dict[str, Any]:
    """What a checkpoint's manifest says, each field as `save` writes it; one of _DAMAGE else."""
    with open_regular(path / MANIFEST) as file:
        manifest = json.load(file)
    if not isinstance(manifest, dict):
        raise ValueError("its manifest is not a JSON object")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"it has format {manifest.get('format')!r:.20}, this version reads {FORMAT}")
    ranks: Any = manifest.get("ranks")
    digests = manifest.get("sha256")
    if not is_whole(tick := manifest.get("tick"), 0) or tick != _tick(path):
        raise ValueError(f"its manifest says step {tick!r:.20}, which is not the step in the folder's name")
    if not is_whole(launch := manifest.get("launch", 0), 0):
        raise ValueError(f"its manifest says launch {launch!r:.20}, and a launch must be a whole number")
    if not is_whole(ranks) or not isinstance(digests, dict):
        raise ValueError(
            f"its manifest must give the number of workers and list their files; it gives {ranks!r:.20} as the number"
        )
    if len(digests) != 2 * ranks or any(name not in digests for rank in range(ranks) for name in names_of(rank)):
        raise ValueError(
            f"its manifest must list two files for each worker (workers: {ranks!r:.20}, files listed: {len(digests)})"
        )
    return manifest


def digest_of(path: AnyPath) -> str:
    """The SHA-256 of a file. OSError, or ValueError where it is no file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def names_of(rank: int) -> tuple[str, str]:
    """The files of a rank's part. Nobody says these names: every rank knows them."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def _write_manifest(partial: AnyPath, final: AnyPath, manifest: bytes, warn: Warn) -> None:
    """The last file of a checkpoint; then it has its name."""
    if isinstance(partial, RemotePath) or isinstance(final, RemotePath):
        write_whole(final / MANIFEST, manifest)
        return
    _write(partial / MANIFEST, manifest)
    sync_folder(partial)
    if os.path.lexists(final):
        remove(final, warn)
    partial.rename(final)
    sync_folder(final.parent)


def remove(path: AnyPath, warn: Warn) -> None:
    """Remove a folder with its contents, a file, or a link itself; `warn` names what cannot be removed."""
    if isinstance(path, RemotePath):
        path.remove()
        return
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as problem:
        warn(f"cannot remove {path}, which the run no longer needs: {problem.strerror}. Remove it yourself")


def _write_parts(partial: AnyPath, group: Group, contents: Mapping[str, Iterable[Piece]]) -> dict[str, CheckpointFile]:
    """Every rank's files, in pieces, written where the folder is seen; on rank 0 all of them, by name."""
    seen = isinstance(partial, RemotePath) or partial.is_dir()
    if seen:
        own, files = (
            {name: write_pieces(partial / name, pieces) for name, pieces in contents.items()},
            dict[str, bytes](),
        )
    else:
        files = {name: b"".join(pieces) for name, pieces in contents.items()}
        own = {name: CheckpointFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    everyone = group.all_gather_json({"seen": seen, "parts": [asdict(part) for part in own.values()]})
    if group.rank != 0:
        for name, part in own.items() if not seen else ():
            _bring(group, io.BytesIO(files[name]), name, part, group.rank)
        return {}
    # A rank's part holds the same model, optimizer and strategy as rank 0's, and less. The factor leaves room for one
    # whose optimizer has stepped, and so holds state, where rank 0's has not.
    most = _MOST_TIMES * max(file.bytes for file in own.values()) + _MOST_MORE_BYTES
    announced = [_announced(rank, said, most) for rank, said in enumerate(everyone)]
    if isinstance(partial, RemotePath):
        for rank, (_, parts) in enumerate(announced):
            check_sizes(partial, parts, f"worker {rank}", "worker 0")
    else:
        for rank, (there, parts) in enumerate(announced):
            for name, part in parts.items() if not there else ():
                with synced(partial / name) as file:
                    _bring(group, file, name, part, rank)
    return {name: part for _, parts in announced for name, part in parts.items()}


def send_parts(
    partial: Path, group: Group, seen: Sequence[bool], files: dict[str, bytes], own_bytes: int
) -> tuple[list[CheckpointFile], OSError | None]:
    """The parts of ranks that do not see the folder, sent to the first one that does; a collective, where one does.

    files: this rank's, {} where it sees the folder; own_bytes: how long those would be. What this rank sent, and what
    kept it from writing what came: it takes all of that in any case, because the others send it.
    """
    keeper = seen.index(True)
    own = {name: CheckpointFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    everyone = group.all_gather_json({"seen": not files, "parts": [asdict(part) for part in own.values()]})
    if group.rank != keeper:
        for name, part in own.items():
            _bring(group, io.BytesIO(files[name]), name, part, group.rank, target=keeper)
        return list(own.values()), None
    problem: OSError | None = None
    most = _MOST_TIMES * own_bytes + _MOST_MORE_BYTES  # as in `_write_parts`
    for rank, said in enumerate(everyone):
        for name, part in _announced(rank, said, most)[1].items() if not seen[rank] else ():
            with _Received(partial / name) as file:
                _bring(group, file, name, part, rank, target=keeper)
            problem = problem or file.problem
    return [], problem


class _Received(io.RawIOBase):
    """A file that takes all that is written to it; `problem` is why it is not on the disk."""

    def __init__(self, path: Path) -> None:
        self.problem: OSError | None = None
        self._stack = ExitStack()
        with self._noted():
            self._file = self._stack.enter_context(synced(path))

    @override
    def write(self, data: Any) -> int:
        if self.problem is None:
            with self._noted():
                self._file.write(data)
        return len(data)

    @override
    def close(self) -> None:
        with self._noted():
            self._stack.close()
        super().close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self.problem = self.problem or problem


def check_sizes(partial: RemotePath, parts: dict[str, CheckpointFile], writer: str, reader: str) -> None:
    """ManyhandsError where the reader sees other files than the writer has written: two places have one name."""
    found = partial.sizes()
    for name, part in parts.items():
        if found.get(name) != part.bytes:
            raise ManyhandsError(
                f"{writer} wrote {name} ({part.bytes} bytes) to {partial}, and {reader} sees {found.get(name, 'no')} bytes "
                "there: give a run directory (run_dir=, --run-dir) that all hosts share"
            )


def _announced(rank: int, said: Any, most: int) -> tuple[bool, dict[str, CheckpointFile]]:
    """(whether this rank sees the folder, its parts by name) of what it says; ManyhandsError where that cannot be."""
    names = names_of(rank)
    seen, parts = (said.get("seen"), said.get("parts")) if isinstance(said, dict) else (None, None)
    files = parts if isinstance(parts, list) and len(parts) == len(names) else []
    if not isinstance(seen, bool) or not files or not all(_is_file(part, most) for part in files):
        raise ManyhandsError(
            f"worker {rank} sent {said!r:.80} to describe its part of a checkpoint, which is not valid: run the same "
            "program and the same version of manyhands on all hosts"
        )
    return seen, {name: CheckpointFile(**part) for name, part in zip(names, files, strict=True)}


def _is_file(said: Any, most: int) -> bool:
    """Whether these are the length, of at most `most` bytes, and the SHA-256 of a file."""
    if not isinstance(said, dict) or said.keys() != {"bytes", "sha256"}:
        return False
    size, digest = said["bytes"], said["sha256"]
    right = is_whole(size, 0) and size <= most and isinstance(digest, str)
    return right and re.fullmatch("[0-9a-f]{64}", digest) is not None


def _holds(saved: Checkpoint) -> bool:
    """Whether this host sees that very checkpoint, and not another one under the same name."""
    manifest = saved.path / MANIFEST
    if isinstance(manifest, RemotePath) or not manifest.is_file():
        return isinstance(manifest, RemotePath)
    try:
        written = json.loads(manifest.read_text())
    except ValueError:
        return False
    return isinstance(written, dict) and written.get("sha256") == {n: part.sha256 for n, part in saved.parts.items()}


def _bring(
    group: Group,
    file: io.BufferedIOBase | io.RawIOBase,
    name: str,
    part: CheckpointFile,
    source: int,
    *,
    target: int | None = 0,
) -> None:
    """One file from rank `source`, who reads it from `file`, to rank `target` (None: to all), who write it there.

    It comes in pieces, so that no announced length decides how much memory is taken. ManyhandsError where something
    else came than was announced.
    """
    found = hashlib.sha256()
    for start in range(0, part.bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, part.bytes - start)
        piece = torch.empty(size, dtype=torch.uint8)
        if group.rank == source and file.readinto(piece.numpy().data) != size:
            raise ManyhandsError(
                f"{name} became shorter than {part.bytes} bytes while it was sent to other hosts. Make sure that "
                "nothing else changes the run directory, and start again with resume=True (--resume)"
            )
        if target is None:
            group.broadcast_(piece, source)
        elif group.rank == source:
            group.send(piece, target)
        else:
            group.receive_(piece, source)
        if group.rank != source:
            file.write(piece.numpy().data)
            found.update(piece.numpy().data)
    if group.rank != source and found.hexdigest() != part.sha256:
        raise ManyhandsError(
            f"{name} arrived changed from worker {source} (expected SHA-256 {part.sha256:.12}…, got "
            f"{found.hexdigest():.12}…). Start again with resume=True (--resume). If it happens again, check that "
            "host's disk and network"
        )


def _write(path: AnyPath, data: bytes) -> None:
    """Write a file; on a disk it is synced."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    with synced(path) as file:
        file.write(data)


def write_pieces(path: AnyPath, pieces: Iterable[Piece]) -> CheckpointFile:
    """Write a file piece by piece, so that other threads go on; on a disk it is synced. Where that fails it is removed."""
    found, size = hashlib.sha256(), 0
    try:
        with path.create() if isinstance(path, RemotePath) else synced(path) as file:
            for piece in pieces:
                file.write(piece)
                found.update(piece)
                size += len(piece)
    except OSError:
        if isinstance(path, Path):
            path.unlink(missing_ok=True)
        raise
    return CheckpointFile(size, found.hexdigest())


def pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The safetensors file of these tensors; none is copied that is contiguous and on the CPU, and others one at a time.

    What the library's own `save` makes, which copies all and lets no other thread go on meanwhile. The format:
    https://huggingface.co/docs/safetensors, 8 bytes with the header's length, a JSON header padded to 8 bytes, then the
    tensors' bytes, here those of the widest numbers first.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    yield header_of({name: (tensors[name].dtype, list(tensors[name].shape)) for name in names})[0]
    for name in names:
        whole = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), _WRITTEN_BYTES):
            yield whole[start : start + _WRITTEN_BYTES]


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, range]]:
    """The beginning of a safetensors file of tensors of these dtypes and shapes, in this order, and where in the file the
    bytes of each lie. ManyhandsError for a dtype that the format has no name for."""
    header, spans, end = dict[str, Any](), dict[str, range](), 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in DTYPES:
            raise ManyhandsError(
                f"{name} is of {dtype}, for which safetensors has no name: use another type for what the run saves"
            )
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        spans[name] = range(start, end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: range(len(begin) + one.start, len(begin) + one.stop) for name, one in spans.items()}


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextmanager
def synced(path: Path) -> Iterator[io.BufferedWriter]:
    """A file to write; it is on the disk afterwards."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """What was renamed within it is on the disk afterwards."""
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
    partial = path.with_name(f"{path.name}.{secrets.token_hex(_TOKEN_BYTES)}{PARTIAL}")  # nobody else's name
    try:
        _write(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)
