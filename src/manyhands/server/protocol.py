"""What a worker and a server shard say to each other: the kinds of frames, and what their fields mean.

A request is answered by one frame, before which any number of WAIT may come: the shard lives, the answer has to wait
for other workers. Vectors have the shard's n elements. A connection is one worker's, so no frame says whose it is.
Where both sit on one host, memory passed by descriptor carries the vectors instead (see versioned_buffer.py), and frames have
none. A payload is what `ServerSpec.compress` makes of an update, as uint8, and always behind its frame.

| request    | carries                            | answer                                                                   |
|------------|------------------------------------|--------------------------------------------------------------------------|
| OFFER      | a: elements, b: a dtype's number   | WANTED, then the worker sends GIVE; or DONE: there is a center           |
| GIVE       | the first center                   | DONE                                                                     |
| AWAIT      | a: elements, b: a dtype's number   | DONE, when there is a center                                             |
| MEMORY     | a: elements, b: a dtype's number   | MEMORY, a: slots, b: bytes from one to the next; then two descriptors    |
| ACTIVATE   |                                    | DONE                                                                     |
| PULL       | a: elements, b: a dtype's number   | CENTER, a: version, and the center; or b: its slot of the memory         |
| PEEK       | as PULL                            | as PULL, unseen by staleness and gate                                    |
| RELEASE    | (the slot was read)                | none                                                                     |
| PUSH       | update, weight, bits, sequence, a  | APPLIED, DROPPED or HELD; a: version, b: staleness; and an answer, below |
| ENCODED    | payload, weight, bits, sequence    | as PUSH                                                                  |
| TICK       | bits; its number, or sequence 0    | GO, bits                                                                 |
| DEACTIVATE |                                    | DONE                                                                     |
| CAPTURE    |                                    | SNAPSHOT, JSON: names, numbers; then a VECTOR for each name              |
| RESTORE    | JSON: names, numbers; then VECTORs | DONE                                                                     |
| GOODBYE    |                                    | none: the connection ends                                                |

A push's `a` is one more than the version from which its staleness counts, 0 for that of the last pull. A worker may send a
push, a pull and a tick before it reads their answers, which come in that order.
DROPPED has in b how many steps this worker is behind. The answer to a push comes with weight and bits; `sequence` gives
where its vector is (`VectorPlace`). REFUSED (JSON: error, message) answers what cannot be right; LATE (JSON: worker,
seconds) what waited for that worker too long, -1 for all.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import is_whole
from manyhands.transport.frame import DTYPES, Frame, FrameError, from_json

SMALL_BYTES = 1 << 16
"""A vector up to this size goes through the socket on one host too: the copy costs less than the bookkeeping."""
_MOST_VECTORS = 16  # of a snapshot, and one of each worker, that a rule may keep


class Kind(IntEnum):
    """Numbers of frames; 0 is the hello's."""

    OFFER = 1
    GIVE = 2
    AWAIT = 3
    MEMORY = 4
    ACTIVATE = 5
    PULL = 6
    PEEK = 7
    RELEASE = 8
    PUSH = 9
    TICK = 10
    DEACTIVATE = 11
    CAPTURE = 12
    RESTORE = 13
    VECTOR = 14
    GOODBYE = 15
    ENCODED = 16

    DONE = 32
    WANTED = 33
    CENTER = 34
    APPLIED = 35
    DROPPED = 36
    HELD = 37
    GO = 38
    SNAPSHOT = 39
    WAIT = 40
    REFUSED = 41
    LATE = 42


class VectorPlace(IntEnum):
    """Where the vector of an answer is."""

    NOWHERE = 0
    OUTBOX = 1
    BEHIND = 2  # the frame


def hello(worker: int, shard: int, shards: int, host: str) -> dict[str, Any]:
    """With which a worker comes to a shard's listener."""
    return {"worker": worker, "shard": shard, "shards": shards, "host": host}


def about(vector: Tensor) -> dict[str, Any]:
    """a and b of a request about such a vector."""
    return {"a": vector.numel(), "b": DTYPES.index(vector.dtype)}


def dtype_of(frame: Frame) -> torch.dtype:
    """The dtype of a request, besides its `a` elements. FrameError for none."""
    if frame.a < 0 or not 0 <= frame.b < len(DTYPES):
        raise FrameError(f"expected a number of elements and a dtype's; got {frame.a} and {frame.b}")
    return DTYPES[frame.b]


def snapshot_of(blob: bytes | memoryview, workers: int) -> tuple[list[str], dict[str, Any]]:
    """(names of the vectors, numbers) of a SNAPSHOT or a RESTORE; FrameError for what is none."""
    content = from_json(blob)
    names, numbers, most = content.get("names"), content.get("numbers"), _MOST_VECTORS + workers
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FrameError(f"expected the names of vectors; got {names!r:.200}")
    if "center" not in names or len(names) != len(set(names)) or len(names) > most:
        raise FrameError(f"expected at most {most} different names, the center's among them; got {names!r:.200}")
    if not isinstance(numbers, dict) or not is_whole(numbers.get("version"), 0):
        raise FrameError(f"expected numbers with a version of at least 0; got {numbers!r:.200}")
    return names, numbers
