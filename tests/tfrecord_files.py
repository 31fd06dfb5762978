"""Writes TFRecord files as the format's guide describes them, their Examples by protobuf's own library."""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Row = dict[str, Sequence[int] | Sequence[float] | Sequence[bytes]]
_TYPES = {"BytesList": "TYPE_BYTES", "FloatList": "TYPE_FLOAT", "Int64List": "TYPE_INT64"}


def records(*rows: bytes) -> bytes:
    """A file of these records."""
    return b"".join(struct.pack("<Q", len(row)) + _crc(struct.pack("<Q", len(row))) + row + _crc(row) for row in rows)


def examples(*rows: Row, packed: bool = True) -> bytes:
    """A file of `tf.train.Example`s."""
    return records(*(example(row, packed) for row in rows))


def example(row: Row, packed: bool = True) -> bytes:
    made = _message(packed)()
    for name, values in row.items():
        feature = made.features.feature[name]
        lists = {int: feature.int64_list, float: feature.float_list, bytes: feature.bytes_list}
        lists[type(values[0])].value.extend(values)
    return bytes(made.SerializeToString())


def _crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


@cache
def _message(packed: bool) -> Any:
    """The class of Example, of example.proto and feature.proto; numbers packed, as there, or one after the other."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"example_{packed}.proto", package=f"example_{packed}", syntax="proto3"
    )
    for name, kind in _TYPES.items():
        field = _field(file.message_type.add(name=name), "value", 1, kind, "LABEL_REPEATED")
        if name != "BytesList":
            field.options.packed = packed
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, of) in enumerate(
        [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")], 1
    ):
        _field(feature, name, number, f".{file.package}.{of}").oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    _field(entry, "key", 1, "TYPE_STRING")
    _field(entry, "value", 2, f".{file.package}.Feature")
    _field(features, "feature", 1, f".{file.package}.Features.FeatureEntry", "LABEL_REPEATED")
    _field(file.message_type.add(name="Example"), "features", 1, f".{file.package}.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Example"))


def _field(message: Any, name: str, number: int, kind: str, label: str = "LABEL_OPTIONAL") -> Any:
    """kind: the name of a type, or `.package.Message`."""
    made = message.field.add(name=name, number=number, label=label)
    if kind.startswith("."):
        made.type, made.type_name = "TYPE_MESSAGE", kind
    else:
        made.type = kind
    return made
