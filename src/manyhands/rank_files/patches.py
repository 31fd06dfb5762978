"""The functions that take paths, replaced: what they write and read is where this rank's view has it.

Replaced are `open`, the functions of `os` and `shutil` that change or look up paths, torch's and safetensors' own,
which write in C, and wherever a loaded module holds one of them under a name of its own. NumPy, pathlib, logging,
zipfile and most others call these. What gets past them is named, by an audit hook. Left alone are files that this rank
alone knows (made by `tempfile`), caches, devices, pipes, sockets, descriptors and paths relative to one.
"""

from __future__ import annotations

import getpass
import glob
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import safetensors
import torch

from manyhands.errors import LIBRARIES
from manyhands.rank_files.file_owner import caches, is_shared
from manyhands.rank_files.folder import as_given, is_as_given
from manyhands.rank_files.views import OtherView, View

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMELESS = getattr(os, "O_TMPFILE", -1)  # a file without a path
_HOLDERS = frozenset(
    (
        *("builtins", "io", "_io", "os", "shutil", "tempfile", "tarfile", "bz2", "lzma", "gzip", "zipfile", "tokenize"),
        *("codecs", "numpy.lib._datasource", "torch", "torch.serialization"),
        *("safetensors", "safetensors.torch", "safetensors.numpy", "safetensors._safetensors_rust"),
    )
)


class Private:
    """Places where one rank alone looks, or that several processes may write to at once."""

    def __init__(self, *places: str) -> None:
        self.places = {os.path.realpath(place) for place in places}
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a number that no name belongs to
            user = str(os.getuid())
        self.places.update(caches(os.environ, tempfile.gettempdir(), user))

    def __call__(self, path: str) -> bool:
        return not is_shared(path, self.places)


class _File(io.FileIO):
    """Says when it is closed, by whoever closes it, the end of its last reference too."""

    closed_by: Callable[[], None] | None = None

    def close(self) -> None:
        try:
            super().close()
        finally:
            done, self.closed_by = self.closed_by, None
            if done is not None:
                done()


class Patches:
    """`install` replaces the functions, `remove` restores them. view: the current rank's view; None: no change."""

    def __init__(self, view: Callable[[], View | None], private: Private) -> None:
        self._view_now, self._private = view, private
        self._fds: dict[int, tuple[View, str]] = {}  # what os.open opened for writing
        self._files: WeakSet[Any] = WeakSet()  # what open opened for writing
        self._named = False
        self._plain = {
            "open": io.open,
            "os_open": os.open,
            "close": os.close,
            **{name: getattr(os, name) for name in (*_ONE, *_TWO, *_LOOKS, *_OF_COPY, "listdir", "scandir", "remove")},
            "rmtree": shutil.rmtree,
            "mkdtemp": tempfile.mkdtemp,
            "mkstemp": tempfile._mkstemp_inner,  # type: ignore[attr-defined]
            "save": torch.save,
            "load": torch.load,
            "serialize_file": safetensors.serialize_file,
            "safe_open": safetensors.safe_open,
        }
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def install(self) -> None:
        made: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "os_open": self._os_open,
            "close": self._close,
            **{name: self._changing(name) for name in (*_ONE, *_OF_COPY, "rmtree")},
            "remove": self._changing("unlink"),
            **{name: self._changing_two(name) for name in _TWO},
            **{name: self._reading_view(name) for name in _LOOKS},
            "listdir": self._listing("listdir"),
            "scandir": self._listing("scandir"),
            "mkdtemp": self._making("mkdtemp"),
            "mkstemp": self._making("mkstemp"),
            "save": self._saving("save", 1, "f"),
            "serialize_file": self._saving("serialize_file", 1, "filename"),
            "load": self._loading("load", "f"),
            "safe_open": self._loading("safe_open", "filename"),
        }
        for name, function in made.items():
            plain = self._plain[name]
            self._replaced[id(plain)] = plain, _named_as(plain, function)
        _replace(self._replaced)
        _watch(self)

    def remove(self) -> None:
        _replace({id(new): (new, old) for old, new in self._replaced.values()})
        _watch(None)

    def flush(self) -> None:
        """What lies in the buffers of files that are still open goes to them."""
        for file in list(self._files):
            if not file.closed:
                file.flush()

    # -- which paths -------------------------------------------------------------------------------------------------

    def _view(self) -> View | None:
        view = None if is_as_given() else self._view_now()
        return None if view is None or view.over else view

    def _path(self, given: Any, follow: bool = False) -> str | None:
        """The absolute path that ranks share, its folder resolved; None: not shared. follow: a final link, too."""
        if isinstance(given, int):
            return None
        try:
            path = os.path.abspath(os.fsdecode(given))
        except TypeError:
            return None
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if follow and os.path.islink(path):
            path = os.path.realpath(path)
        return None if self._private(path) else path

    def _file(self, given: Any) -> str | None:
        """The same, of what is to be written as a file, and so no folder, device, pipe or socket."""
        path = self._path(given, follow=True)
        try:
            return path if path is None or stat.S_ISREG(os.stat(path).st_mode) else None
        except OSError:
            return path

    # -- open --------------------------------------------------------------------------------------------------------

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        view, given = self._view(), (mode, buffering, encoding, errors, newline, closefd, opener)
        if view is None or (isinstance(file, int) and file not in self._fds):
            return self._plain["open"](file, *given)
        with as_given(), _errors_name(file, view):
            if not set(mode) & set("wax+"):
                path = self._path(file, follow=True) if isinstance(view, OtherView) else None
                return self._plain["open"](file if path is None else _unless(view.source(path), path, file), *given)
            if isinstance(file, int):
                view, path = self._fds.pop(file)
                at: Any = file
            else:
                path = self._file(file)
                if path is None or mode.translate(_NO_LETTERS) not in _MODES:
                    return self._plain["open"](file, *given)
                at = view.begin(path, fresh="w" in mode, new="x" in mode)
            return self._opened(view, path, _unless(at, path, file), file, given)

    def _opened(self, view: View, path: str, at: Any, name: Any, given: tuple[Any, ...]) -> Any:
        """As `open` puts a file together."""
        mode, buffering, encoding, errors, newline, closefd, opener = given
        raw: Any = None
        try:
            raw = _File(at, mode.translate(_NO_LETTERS), closefd, opener)
            raw.name = name
            file = raw
            if not ("b" in mode and buffering == 0):
                kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
                file = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
            if "b" not in mode:
                lines = buffering == 1 or (buffering == -1 and raw.isatty())
                file = io.TextIOWrapper(file, io.text_encoding(encoding), errors, newline, lines)
                file.mode = mode  # type: ignore[misc]
        except BaseException:
            if raw is not None:
                raw.close()
            view.undo(path)
            raise
        raw.closed_by = lambda: view.end(path)
        self._files.add(file)
        return file

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        view = self._view()
        if view is None or dir_fd is not None or flags & _NAMELESS == _NAMELESS:
            with as_given():  # the audit hook could not know where it is
                return int(self._plain["os_open"](path, flags, mode, dir_fd=dir_fd))
        with as_given(), _errors_name(path, view):
            if not flags & _WRITES:
                found = self._path(path) if isinstance(view, OtherView) else None
                return int(self._plain["os_open"](path if found is None else view.source(found), flags, mode))
            found = self._file(path)
            if found is None:
                return int(self._plain["os_open"](path, flags, mode))
            new = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
            at = view.begin(found, fresh=bool(flags & os.O_TRUNC), new=new)
            try:
                fd = int(self._plain["os_open"](at, flags, mode))
            except OSError:
                view.undo(found)
                raise
            self._fds[fd] = view, found
            return fd

    def _close(self, fd: int) -> None:
        self._plain["close"](fd)
        if fd in self._fds:
            view, path = self._fds.pop(fd)
            view.end(path)

    # -- what writes and reads in C ----------------------------------------------------------------------------------

    def _saving(self, name: str, place: int, keyword: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def save(*given: Any, **named: Any) -> Any:
            view = self._view()
            file = given[place] if len(given) > place else named.get(keyword)
            with as_given():
                path = None if view is None or not isinstance(file, str | os.PathLike) else self._file(file)
            if view is None or path is None:
                return plain(*given, **named)
            with as_given(), _errors_name(file, view):
                at = view.begin(path)
                parts = (*given[:place], at, *given[place + 1 :]) if len(given) > place else given
                try:
                    result = plain(*parts, **(named | {keyword: at} if len(given) <= place else named))
                except BaseException:
                    view.undo(path)
                    raise
                view.end(path)
                return result

        return save

    def _loading(self, name: str, keyword: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def load(*given: Any, **named: Any) -> Any:
            view = self._view()
            file = given[0] if given else named.get(keyword)
            if not isinstance(view, OtherView) or not isinstance(file, str | os.PathLike):
                return plain(*given, **named)
            with as_given():
                path = self._path(file)
                at = file if path is None else view.source(path)
            return plain(at, *given[1:], **named) if given else plain(**{**named, keyword: at})

        return load

    # -- os and shutil -----------------------------------------------------------------------------------------------

    def _changing(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def change(path: Any, *given: Any, **named: Any) -> Any:
            view = self._view()
            if view is None or named.get("dir_fd") is not None:
                return plain(path, *given, **named)
            named.pop("dir_fd", None)
            with as_given(), _errors_name(path, view):
                found = self._path(path)
                if found is None:
                    return plain(path, *given, **named)
                if name not in _OF_COPY:
                    return getattr(view, name)(found, *given, **named)
                if isinstance(view, OtherView):
                    return view.of_copy(plain, found, *given, **named)
                return plain(path, *given, **named)

        return change

    def _changing_two(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]
        method = "rename" if name == "replace" else name

        def change(source: Any, target: Any, *given: Any, **named: Any) -> Any:
            view = self._view()
            if view is None or any(named.get(fd) is not None for fd in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
                return plain(source, target, *given, **named)
            with as_given(), _errors_name(source, view):
                there = self._path(target)
                here = source if name == "symlink" else self._path(source)
                if there is None and (here is None or name == "symlink"):
                    return plain(source, target, *given, **named)
                here = os.path.abspath(os.fsdecode(source)) if here is None else here
                there = os.path.abspath(os.fsdecode(target)) if there is None else there
                return getattr(view, method)(here, there)

        return change

    def _reading_view(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def look(path: Any, *given: Any, **named: Any) -> Any:
            view = self._view()
            if not isinstance(view, OtherView) or named.get("dir_fd") is not None or not view.has_changes():
                return plain(path, *given, **named)
            with as_given(), _errors_name(path, view):
                found = self._path(path)
                return plain(path if found is None else _unless(view.source(found), found, path), *given, **named)

        return look

    def _listing(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def listed(path: Any = ".") -> Any:
            view = self._view()
            if not isinstance(view, OtherView) or path is None or isinstance(path, int) or not view.has_changes():
                return plain(path)
            with as_given(), _errors_name(path, view):
                found = self._path(path)
                if found is None or (name == "scandir" and not view.has_changes_in(found)):
                    return plain(path)
                names = view.listdir(found)
                if name == "scandir":
                    return _Scan([_Entry(os.path.join(os.fsdecode(path), one), one) for one in names])
                return [os.fsencode(one) for one in names] if isinstance(path, bytes) else names

        return listed

    # -- tempfile ----------------------------------------------------------------------------------------------------

    def _making(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def make(*given: Any, **named: Any) -> Any:
            with as_given():
                made = plain(*given, **named)
                path = made if name == "mkdtemp" else made[1]
                self._private.places.add(os.path.realpath(os.fsdecode(path)))
            return made

        return make

    # -- who gets past -----------------------------------------------------------------------------------------------

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        """Name the first file that is written past all this, by another rank than the first."""
        view = None if self._named else self._view()
        if not isinstance(view, OtherView) or (event == "open" and not (given[2] or 0) & _WRITES):
            return
        with as_given():
            path = self._file(given[0])
            if path is None or (event != "open" and os.path.basename(path) in ("", ":memory:")):
                return
            self._named = True
            by = "sqlite3" if event != "open" else "code that does not call Python's open"
            sys.stderr.write(
                f"manyhands: workers {view.folder.first} and {view.rank} both write {path} with {by}, so one may "
                "destroy the other's data: write such files on one worker only, under `if mh.is_first():`\n"
            )


_ONE = ("mkdir", "rmdir", "unlink", "truncate")
_TWO = ("rename", "replace", "link", "symlink")
_LOOKS = tuple(
    name for name in ("stat", "lstat", "access", "readlink", "chdir", "listxattr", "getxattr") if hasattr(os, name)
)
_OF_COPY = tuple(name for name in ("chmod", "utime", "chown", "setxattr", "removexattr") if hasattr(os, name))
_NO_LETTERS = {ord("b"): None, ord("t"): None, ord("U"): None}
_MODES = ("w", "a", "x", "r+", "+r", "w+", "+w", "a+", "+a", "x+", "+x")


def _named_as(plain: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the plain one's name, by which pickle and help find it."""

    @wraps(plain)
    def replaced(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    if replaced.__module__ == "posix":
        replaced.__module__ = "os"
    return replaced


def _unless(at: str, path: str, given: Any) -> Any:
    """What the caller gave, where the path is what it was."""
    return given if at == path else at


@contextmanager
def _errors_name(given: Any, view: View) -> Iterator[None]:
    """Errors name the path that the caller gave, not the copy."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and error.filename.startswith(view.folder.root):
            error.filename = given
        raise


def _replace(replaced: dict[int, tuple[Any, Any]]) -> None:
    """Whatever the name: `tarfile` has an `open` of its own. In all modules of the user's, and in some libraries' alone.

    To look through all would copy their pages into each forked process. Not in `posix`, by which Python imports.
    """
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})  # what lies there need not be a module
        file = names.get("__file__")
        if name not in _HOLDERS and (file is None or file.startswith(LIBRARIES)):
            continue
        for key, value in list(names.items()):
            if id(value) in replaced and replaced[id(value)][0] is value:
                names[key] = replaced[id(value)][1]
    globber = getattr(glob, "_StringGlobber", None)  # of Python 3.13: by which pathlib globs
    for key, value in list(vars(globber).items()) if globber else ():
        if isinstance(value, staticmethod) and id(value.__func__) in replaced:
            setattr(globber, key, staticmethod(replaced[id(value.__func__)][1]))


class _Entry:
    """As os.DirEntry, of a path that may be a copy's."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _Scan(Iterator[_Entry], AbstractContextManager["_Scan", None]):
    """As what os.scandir gives."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter([])


_watching: Patches | None = None
_hooked = False


def _watch(patches: Patches | None) -> None:
    """An audit hook stays for ever: there is one, which asks whoever is installed."""
    global _watching, _hooked
    _watching = patches
    if not _hooked and patches is not None:
        _hooked = True
        sys.addaudithook(_audited)


def _audited(event: str, given: tuple[Any, ...]) -> None:
    if _watching is not None and event in ("open", "sqlite3.connect"):
        _watching.audit(event, given)
