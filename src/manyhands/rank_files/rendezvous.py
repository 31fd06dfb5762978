"""Ranks that see the same files meet at one folder; the lowest of them is the first, whose files are the run's."""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

from manyhands.comm.checks import OPERATIONS
from manyhands.comm.group import Group, Ledger
from manyhands.errors import ManyhandsError
from manyhands.rank_files import merge
from manyhands.rank_files.folder import CollectiveCounts, Folder, as_given
from manyhands.rank_files.patches import Patches, Private
from manyhands.rank_files.views import FirstView, OtherView, View

_COLLECTIVES = ("start_mean_", *(name for name in OPERATIONS if name != "send"))

_view: View | None = None
_counted: WeakSet[Group] = WeakSet()


def keep_apart(group: Group, timeout_s: float) -> None:
    """From now on, until this process ends, ranks other than the first write to a folder of their own. A collective.

    Called again with another group, its collectives count as well.
    """
    global _view
    if _view is None:
        _view = _begin(group, timeout_s)
    _count(group, _view)


def _begin(group: Group, timeout_s: float) -> View:
    with _uncounted(group):
        folder = _meet(group)
        rank, first = group.rank, folder.first
        locks = [folder.lock("lock", fcntl.LOCK_SH)]
        if rank == first:
            locks.append(folder.lock("alive", fcntl.LOCK_EX))
            _start_settling(folder)
        group.barrier()  # all hold their lock before one may be the last
    private, turns = Private(folder.root), CollectiveCounts(folder)
    if rank == first:
        view: View = FirstView(folder, rank, turns)
    else:
        view = OtherView(folder, rank, group.size, turns, timeout_s, private)
    view.journal.open()
    patches = Patches(lambda: view, private)
    held = [lock for lock in locks if lock is not None]

    def in_child() -> None:
        """A loader's process writes with this rank, and may outlive it."""
        view.after_fork()
        for lock in held:
            os.close(lock)
        held.clear()

    def end() -> None:
        if held:  # in this very process
            patches.flush()
            view.leave(well=getattr(sys, "last_type", None) is None)  # else an exception has ended the script
            os.close(held.pop(0))
            merge.settle(folder)

    os.register_at_fork(after_in_child=in_child)
    atexit.register(end)
    patches.install()
    return view


@contextmanager
def kept_apart(size: int, rank_now: Callable[[], int | None]) -> Iterator[None]:
    """As `keep_apart`, for ranks that take turns in this process, without waiting; None: no rank's turn."""
    folder = Folder.make(tempfile.gettempdir(), 0)
    private, turns = Private(folder.root), CollectiveCounts(folder)
    views: dict[int, View] = {0: FirstView(folder, 0, turns)}

    def view() -> View | None:
        rank = rank_now()
        if rank is not None and rank not in views:
            views[rank] = OtherView(folder, rank, size, turns, 0.0, private)
        return None if rank is None else views[rank]

    patches, well = Patches(view, private), False
    patches.install()
    try:
        yield
        well = True
    finally:
        patches.remove()
        patches.flush()
        for one in views.values():
            one.leave(well)
            one.close()
        merge.settle(folder)


def _meet(group: Group) -> Folder:
    """The folder of this rank and of those that see it; the ranks that do not, meet at another.

    It lies in the temporary folder, or in the working folder where more ranks see that. A collective.
    """
    waiting, mine = list(range(group.size)), None
    while waiting:
        found, met = "", list[int]()
        for where in (tempfile.gettempdir(), os.getcwd()):
            offered = _offer(where, waiting[0]) if group.rank == waiting[0] else None
            root = group.all_gather_json(None if offered is None else offered.root)[waiting[0]]
            sees = group.all_gather_json(root is not None and _sees(root))
            seeing = [rank for rank in waiting if sees[rank]]
            worse = root if len(seeing) <= len(met) else found
            if group.rank == waiting[0] and worse:
                Folder(worse, waiting[0]).remove()
            if len(seeing) > len(met):
                found, met = root, seeing
            if met == waiting:
                break
        if not met:
            raise ManyhandsError(
                f"worker {waiting[0]} needs a temporary folder, and cannot make one in {tempfile.gettempdir()} or in "
                f"{os.getcwd()}: set TMPDIR to a folder that can be written to"
            )
        if group.rank in met:
            mine = Folder(found, waiting[0])
        waiting = [rank for rank in waiting if rank not in met]
    assert mine is not None  # every rank has met
    return mine


def _offer(where: str, first: int) -> Folder | None:
    try:
        return Folder.make(where, first)
    except OSError:  # nobody may write there
        return None


def _sees(root: str) -> bool:
    return os.path.isdir(root)


@contextmanager
def _uncounted(group: Group) -> Iterator[None]:
    """Within, what travels is not the script's."""
    before, group.ledger = group.ledger, Ledger()
    try:
        yield
    finally:
        group.ledger = before


def _count(group: Group, view: View) -> None:
    """The view is notified of each collective as it begins, once where it consists of others."""
    if group in _counted:
        return
    _counted.add(group)
    depth = 0

    def quiet(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def collective(*given: Any, **named: Any) -> Any:
            nonlocal depth
            if not depth:
                with as_given():
                    view.turn()
            depth += 1
            try:
                return plain(*given, **named)
            finally:
                depth -= 1

        return collective

    for name in _COLLECTIVES:
        setattr(group, name, quiet(getattr(group, name)))


def _start_settling(folder: Folder) -> None:
    """A process that outlives all ranks, however they end, and leaves nothing of the folder."""
    source = str(Path(merge.__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {source!r}); from manyhands.rank_files.merge import Folder, settle; settle(Folder({folder.root!r}, {folder.first}), wait=True)"
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-E", "-S", "-c", program],
            dict(os.environ),
            file_actions=[(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)],
            setsid=True,
        )
    finally:
        os.close(null)
