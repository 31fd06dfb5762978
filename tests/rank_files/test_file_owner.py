from __future__ import annotations

import pytest

from manyhands.rank_files.file_owner import (
    Changes,
    FileSource,
    caches,
    destination,
    governing,
    is_own,
    is_shared,
    source_of,
)

NEVER = Changes()


@pytest.mark.parametrize(
    ("own", "first", "passed", "expected"),
    [
        (NEVER, Changes(3, 3), False, FileSource.REAL),  # read only
        (Changes(1, 0), Changes(1, 1), False, FileSource.OWN),  # open here
        (Changes(1, 1), NEVER, False, FileSource.WAIT),
        (Changes(1, 1), NEVER, True, FileSource.OWN),
        (Changes(2, 2), Changes(2, 1), False, FileSource.WAIT),  # half written there
        (Changes(2, 2), Changes(1, 1), False, FileSource.WAIT),
        (Changes(2, 2), Changes(2, 2), False, FileSource.REAL),
        (Changes(2, 2), Changes(3, 2), False, FileSource.OWN),  # being written anew
        (Changes(2, 2), Changes(3, 3), False, FileSource.OWN),
    ],
)
def test_source(own: Changes, first: Changes, passed: bool, expected: FileSource) -> None:
    assert source_of(own, first, passed) is expected


def test_a_path_is_a_ranks_own_once_the_first_has_passed_it_by() -> None:
    assert is_own(Changes(1, 1), NEVER, passed=True)
    assert not is_own(Changes(1, 1), NEVER, passed=False)
    assert not is_own(Changes(1, 1), Changes(1, 0), passed=True)
    assert not is_own(Changes(1, 0), NEVER, passed=True)


def test_destination() -> None:
    assert destination("/a", 2, exists=False, taken=False, complete=False) == "/a"
    assert destination("/a", 2, exists=True, taken=False, complete=True) == "/a"
    assert destination("/a", 2, exists=True, taken=False, complete=False) == "/a.rank-2"
    assert destination("/a", 2, exists=False, taken=True, complete=True) == "/a.rank-2"


def test_the_last_change_of_a_path_or_a_folder_above_governs() -> None:
    changes = {"/a": Changes(at=3), "/a/b/c": Changes(at=2), "/d": Changes(at=9)}
    assert governing("/a/b/c", changes) == "/a"
    assert governing("/d/e", changes) == "/d"
    assert governing("/f", changes) is None


def test_shared_paths() -> None:
    private = {"/tmp/x", *caches({"HOME": "/home/u", "HF_HOME": "/models"}, "/tmp", "u")}
    for path in ("/tmp/x/y", "/home/u/.cache/a", "/models/b", "/tmp/torchinductor_u/c", "/dev/null", "/proc/self/fd/1"):
        assert not is_shared(path, private), path
    assert not is_shared("/home/u/__pycache__/a.pyc", private)
    for path in ("/tmp/xy", "/home/u/model.pt", "/device/a"):
        assert is_shared(path, private), path
