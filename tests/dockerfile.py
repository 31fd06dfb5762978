"""The repository's Dockerfile, as tests read it: its instructions, joined lines."""

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def instructions(path: Path = ROOT / "Dockerfile") -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest of its line) in order, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


def pairs(name: str) -> dict[str, str]:
    """What ENV or ARG set: {name: value}, in all stages."""
    words = [word for instruction, rest in instructions() if instruction == name for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def last(name: str) -> str:
    """The rest of the last such instruction, which is the one that holds."""
    return [rest for instruction, rest in instructions() if instruction == name][-1]
