"""Which format a file has, by its suffix."""

from __future__ import annotations

import re

from manyhands.data.input_counters import InputCounters
from manyhands.data.shards.formats.arrow import Arrow
from manyhands.data.shards.formats.base import ShardFile
from manyhands.data.shards.formats.lines import Csv, Json, Text
from manyhands.data.shards.formats.mosaic import Mosaic
from manyhands.data.shards.formats.parquet import Parquet
from manyhands.data.shards.formats.tar import Tar
from manyhands.data.shards.formats.tfrecord import TFRecord
from manyhands.data.shards.stored_file import StoredFile
from manyhands.errors import BadInput

FORMATS: dict[str, tuple[re.Pattern[str], type[ShardFile]]] = {
    ".parquet": (re.compile(r"\.(parquet|pq)$", re.IGNORECASE), Parquet),
    ".arrow": (re.compile(r"\.(arrow|feather)$", re.IGNORECASE), Arrow),
    ".tfrecord": (re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$", re.IGNORECASE), TFRecord),
    ".tar": (re.compile(r"\.(tar|tar\.gz|tgz)$", re.IGNORECASE), Tar),
    ".mds": (re.compile(r"\.mds$", re.IGNORECASE), Mosaic),
    ".csv": (re.compile(r"\.(csv|tsv)$", re.IGNORECASE), Csv),
    ".jsonl": (re.compile(r"\.(jsonl|ndjson)$", re.IGNORECASE), Json),
    ".txt": (re.compile(r"\.(txt|text)$", re.IGNORECASE), Text),
}
"""{the format's name: the suffixes that stand for it, how it is read}"""
KINDS = ".parquet, .arrow, .tfrecord, .tar, .mds, .csv, .jsonl or .txt files, or a folder of one of these"


def format_of(url: str) -> str | None:
    """The name in FORMATS of a file's format; None for other suffixes."""
    return next((name for name, (pattern, _) in FORMATS.items() if pattern.search(url)), None)


def shard_file(url: str, counters: InputCounters | None = None) -> ShardFile:
    """The file of a URL; it is not opened. Raises BadInput for a suffix that stands for no format."""
    name = format_of(url)
    if name is None:
        raise BadInput(f"cannot read {url!r}: expected {KINDS}")
    return FORMATS[name][1](StoredFile(url, counters))
