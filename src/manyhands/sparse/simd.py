"""Vectors of numbers for compiled functions: what one instruction of this processor works on at once.

numba's own vectorisation gives up where several rows of one table are read and written together, because it cannot
know that they do not overlap. Here the loads and stores stand in the code, in their order. A vector holds lanes(array)
numbers of the array's type; the last one of a row may be filled with zeros:

    for j in range(np.uint64(0), dim, lanes(table)):
        total = fma(load(table, a + j, dim - j), load(table, b + j, dim - j), total)

Indices are uint64. Only code inside functions of `compiled` may call what stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_BITS = 512 if binding.get_host_cpu_features().get("avx512f") else 256
_I32 = ir.IntType(32)


def _instruction(function: Callable[..., Any]) -> Any:
    """What compiled functions call: `function` gives the types of its arguments and result, and builds the code."""
    return intrinsic(function)


class _Vector(types.Type):
    def __init__(self, dtype: Any) -> None:
        self.dtype, self.lanes = dtype, _BITS // dtype.bitwidth
        super().__init__(name=f"Vector({dtype} x {self.lanes})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager[vector.dtype].get_value_type(), vector.lanes))  # type: ignore[no-untyped-call]


@_instruction
def lanes(typing: Any, array: Any) -> Any:
    """How many of the array's numbers a vector holds, uint64."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.uint64, _Vector(array.dtype).lanes)

    return types.uint64(array), build


@_instruction
def zeros(typing: Any, array: Any) -> Any:
    """A vector of zeros of the array's type."""
    vector = _Vector(array.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), None)

    return vector(array), build


@_instruction
def every(typing: Any, array: Any, at: Any) -> Any:
    """A vector whose numbers all are array[at]."""
    vector = _Vector(array.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(_place(context, builder, signature, arguments))
        return _spread(builder, number, vector.lanes)

    return vector(array, types.uint64), build


@_instruction
def load(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at], array[at + 1], …: of these the first `count`, and zeros behind them."""
    vector = _Vector(array.dtype)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(vector)
        place = builder.bitcast(_place(context, builder, signature, arguments), kind.as_pointer())
        mask = _first(builder, arguments[2], vector.lanes)
        none = ir.Constant(kind, None)
        return _call(builder, f"llvm.masked.load.{_name(kind)}.p0", kind, [place, _I32(_bytes(vector)), mask, none])

    return vector(array, types.uint64, types.uint64), build


@_instruction
def store(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """The first `count` numbers of the vector `value` to array[at], array[at + 1], …"""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[2].type
        place = builder.bitcast(_place(context, builder, signature, arguments), kind.as_pointer())
        mask = _first(builder, arguments[3], value.lanes)
        given = [arguments[2], place, _I32(_bytes(value)), mask]
        _call(builder, f"llvm.masked.store.{_name(kind)}.p0", ir.VoidType(), given)
        return context.get_dummy_value()

    return types.void(array, types.uint64, value, types.uint64), build


@_instruction
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, number by number."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        return _call(builder, f"llvm.fma.{_name(kind)}", kind, arguments)

    return a(a, a, a), build


@_instruction
def add(typing: Any, a: Any, b: Any) -> Any:
    """a + b, number by number."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return a(a, a), build


@_instruction
def total(typing: Any, vector: Any) -> Any:
    """The sum of a vector's numbers."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        given = [ir.Constant(kind.element, -0.0), arguments[0]]
        return _call(builder, f"llvm.vector.reduce.fadd.{_name(kind)}", kind.element, given, fastmath=("reassoc",))

    return vector.dtype(vector), build


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of array[at], the first two arguments."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _spread(builder: Any, number: Any, lanes: int) -> Any:
    kind = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _first(builder: Any, count: Any, lanes: int) -> Any:
    """A mask of the first `count` lanes."""
    numbers = ir.Constant(ir.VectorType(count.type, lanes), list(range(lanes)))
    return builder.icmp_unsigned("<", numbers, _spread(builder, count, lanes))


def _call(builder: Any, name: str, result: Any, arguments: Any, **flags: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, **flags)


def _name(kind: Any) -> str:
    return f"v{kind.count}f{32 if isinstance(kind.element, ir.FloatType) else 64}"


def _bytes(vector: _Vector) -> int:
    return int(np.dtype(vector.dtype.name).itemsize)
