"""TFRecord files that are cut, turned and spliced: rows, or an error that names the record."""

from __future__ import annotations

import gzip
import io
import zlib

import pytest

from fuzzing import Damage, bounded, survive
from manyhands.data.readers import tfrecords
from manyhands.errors import BadInput
from tfrecord_files import example, examples, records

ROWS = [{"x": [1.5, 2.5], "y": [-1], "name": [b"one"]}, {"x": [3.0, 4.0], "y": [1 << 62], "name": [b"two"]}]
FILE = examples(*ROWS)


def read(data: bytes) -> None:
    batches = list(tfrecords.read(io.BytesIO(data), "the file"))
    assert sum(batch.num_rows for batch in batches) == tfrecords.count(io.BytesIO(data), "the file")


def test_files(inputs: int) -> None:
    damage = Damage(1)
    valid = [FILE, FILE + FILE, records(b"", b"\x0a\x00"), gzip.compress(FILE), zlib.compress(FILE)]
    with bounded(256):
        taken, refused = survive(read, (damage.of_bytes(*valid) for _ in range(inputs // 2)), BadInput)
    assert taken
    assert refused


@pytest.mark.parametrize("packed", [True, False])
def test_examples_with_right_checksums(packed: bool, inputs: int) -> None:
    """Damage that no checksum tells: made before the file was written."""
    damage = Damage(packed)
    valid = [example(row, packed) for row in ROWS]

    def drawn() -> bytes:
        return records(*(damage.of_bytes(one) if damage.random() < 0.7 else one for one in valid))

    with bounded(256):
        taken, refused = survive(read, (drawn() for _ in range(inputs // 4)), BadInput)
    assert taken
    assert refused
