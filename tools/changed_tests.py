"""Print which test files and folders go with what has changed: `make test-changed`.

    python tools/changed_tests.py [COMMIT]    # what differs from COMMIT, by default from the last one, new files included

src/manyhands/FOLDER/… goes with tests/FOLDER, a module at the top with the tests at the top; a test goes with itself, a
helper module of tests with its folder. It does not follow imports: before a commit is pushed, `make test` runs all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tests_of(path: Path) -> set[str]:
    """The tests that go with a changed file, by its path below the root."""
    tests = ROOT / "tests"
    match path.parts:
        case ("src", "manyhands", folder, _, *_):
            found = [place for place in (tests / folder, tests / f"{folder}_") if place.is_dir()]
        case ("src", *_):
            found = list(tests.glob("test_*.py"))
        case ("tests", *_) if path.suffix == ".py" and path.name != "conftest.py":
            itself = path.name.startswith("test_") or len(path.parts) == 2
            found = [ROOT / path] if itself and path.name.startswith("test_") else [(ROOT / path).parent]
        case (*_, name) if name.endswith(".md"):
            found = list(tests.glob("test_readme.py"))
        case _:
            found = []
    return {str(place.relative_to(ROOT)) for place in found if place.exists()}


def main() -> None:
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    listed = [["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"]]
    texts = [subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout for words in listed]
    chosen = set().union(*(tests_of(Path(line)) for text in texts for line in text.splitlines()))
    within = {one for one in chosen if any(one.startswith(f"{other}/") for other in chosen)}
    print(*sorted(chosen - within))
    if not chosen:
        sys.exit("nothing has changed that tests go with")


if __name__ == "__main__":
    main()
