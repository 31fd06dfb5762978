"""One driver at a time in a run directory."""

import errno
import os
import signal
import socket
from pathlib import Path

import pytest

from manyhands.checkpoint import launch_lock
from manyhands.checkpoint.launch_lock import LaunchLock, claim_in
from manyhands.checkpoint.paths import RemotePath
from manyhands.errors import BadInput, ManyhandsError
from refusals import refused


def in_a_child(lock: LaunchLock | None, directory: Path) -> tuple[int, int]:
    """(process, its end of a pipe) of a fork that holds what it inherited, or a lock of its own, until the pipe is closed."""
    told, ours = os.pipe()
    theirs, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        own = LaunchLock(directory) if lock is None else None
        os.write(held, b"x")
        os.read(told, 1)
        os._exit(0 if own else 1)
    os.close(told)
    os.read(theirs, 1)
    os.close(theirs)
    os.close(held)
    return child, ours


def test_the_second_driver_hears_who_is_at_work(tmp_path: Path) -> None:
    first = LaunchLock(tmp_path)
    assert first.claim(1).number == 1
    with pytest.raises(
        BadInput, match=rf"another run uses .*launch 1, process {os.getpid()} on {socket.gethostname()}"
    ) as output:
        LaunchLock(tmp_path)
    assert output.value.exit_code == 2
    first.close()
    second = LaunchLock(tmp_path)
    assert second.claim(1).number == 2
    second.close()


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    child, pipe = in_a_child(None, tmp_path)
    refused("another process", LaunchLock, tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    LaunchLock(tmp_path).close()
    os.close(pipe)


def test_a_process_that_the_driver_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = LaunchLock(tmp_path)
    child, pipe = in_a_child(lock, tmp_path)
    with pytest.raises(BadInput):
        LaunchLock(tmp_path)  # the child's end does not take the driver's lock either
    lock.close()
    LaunchLock(tmp_path).close()
    os.close(pipe)
    os.waitpid(child, 0)


def test_a_launch_json_that_says_nothing_is_written_anew(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"number": "7", "pid": 1}', '{"number": true}', "[" * 4000, "\0" * 20):
        (tmp_path / "launch.json").write_text(text)
        assert claim_in(tmp_path) is None, text[:30]
        lock = LaunchLock(tmp_path)
        assert lock.claim(5).number == 5, text[:30]
        assert claim_in(tmp_path) is not None
        lock.close()
    (tmp_path / "launch.json").unlink()
    os.mkfifo(tmp_path / "launch.json")  # a pipe in its place is refused, and nobody waits
    refused("must be a file", LaunchLock, tmp_path)


def test_the_later_launch_has_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts again under its lock; elsewhere than on a disk; and where there are no locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def check(first: LaunchLock, second: LaunchLock) -> None:
        earlier = first.claim(1)
        earlier.check()
        later = second.claim(2 if first is second else 1)
        assert (earlier.number, later.number) == (1, 2)
        later.check()
        words = r"another run now uses .*launch 2, process \d+ on .*this run \(launch 1"
        refused(words, earlier.check, kind=ManyhandsError)
        for lock in {id(one): one for one in (first, second)}.values():
            lock.close()

    (tmp_path / "again").mkdir()
    lock = LaunchLock(tmp_path / "again")
    check(lock, lock)
    elsewhere = RemotePath(f"memory:/{tmp_path}")
    check(LaunchLock(elsewhere), LaunchLock(elsewhere))
    elsewhere.remove()
    monkeypatch.setattr(launch_lock.fcntl, "flock", refuse)
    first, second = LaunchLock(tmp_path), LaunchLock(tmp_path)
    assert not second.exclusive
    check(first, second)
