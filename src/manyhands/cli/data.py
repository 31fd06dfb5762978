"""`manyhands data PATH`: what files hold, how they would be dealt to workers; and their rows written in another form."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from manyhands import units
from manyhands.cli import options, tables
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.data.shards.survey import Sharing, Spread, Survey

WIDTH, NARROWEST = 100, 60
_CELL = 24  # characters of a value among the first rows
_FEW = 8  # workers with a line each
_OF_SURVEY = ("workers", "batch_size", "rows", "count")
_OF_WRITING = ("format", "rows_per_file", "row_group_bytes", "seed")


def data(
    ctx: typer.Context,
    paths: options.DataPaths,
    workers: options.DataWorkers = 1,
    batch_size: options.DataBatchSize = 64,
    shuffle: options.DataShuffle = None,
    columns: options.DataColumns = None,
    rows: options.DataRows = 3,
    count: options.DataCount = None,
    to: options.DataTo = None,
    format: options.DataFormat = None,
    rows_per_file: options.DataRowsPerFile = None,
    row_group_bytes: options.DataRowGroupBytes = None,
    seed: options.DataSeed = 0,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Say what files hold, and what each worker would read of them; or write their rows in another form.

    [bold]manyhands data rows/[/bold]
    [bold]manyhands data 's3://bucket/rows-*.parquet' -n 8 --batch-size 512 --shuffle blocks:32[/bold]
    [bold]manyhands data images.tar --to rows.parquet[/bold]
    [bold]manyhands data rows.csv --to rows/ --format tfrecord --rows-per-file 100000 --shuffle rows[/bold]

    Formats: Parquet, Arrow, TFRecord, tar (webdataset's layout), CSV, JSON lines
    and text. What is better changed before training stands last, under advice.
    """
    given = {name for name in (*_OF_SURVEY, *_OF_WRITING) if _is_given(ctx, name)}
    wanted = [] if columns is None else [name.strip() for name in columns.split(",")]
    if to is None:
        if wrong := [name for name in _OF_WRITING if name in given]:
            raise BadInput(f"{_option(wrong[0])} is of writing: give --to, too, or leave it out")
        _show(paths, wanted, workers, batch_size, shuffle, rows, count, as_json)
        return
    if wrong := [name for name in _OF_SURVEY if name in given]:
        raise BadInput(f"{_option(wrong[0])} says how rows would be dealt, and --to writes them: leave one of them out")
    if shuffle not in (None, "rows", "none"):
        raise BadInput(
            f"with --to the rows are written in a random order or in their own: give --shuffle rows, not {shuffle}"
        )
    from manyhands.data.shards.source import shards
    from manyhands.data.shards.write import write_shards

    arrays = len(paths) == 1 and paths[0].lower().endswith((".npz", ".npy"))
    with tables.bar_of("rows") as progress:
        written = write_shards(
            paths[0] if arrays else shards(paths),
            to,
            format=format,
            columns=wanted,
            rows_per_file=rows_per_file,
            row_group_bytes=row_group_bytes,
            shuffle=shuffle == "rows",
            seed=seed,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(written), indent=2))
        return
    for change in written.changes:
        typer.echo(f"manyhands: column {change}", err=True)
    files = units.count(len(written.files), "file")
    typer.echo(f"{to}: {units.count(written.rows, 'row')} in {files}, {units.size(written.bytes)}")


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _show(
    paths: Sequence[str],
    columns: Sequence[str],
    workers: int,
    batch_size: int,
    shuffle: str | None,
    rows: int,
    count: bool | None,
    as_json: bool,
) -> None:
    from manyhands.data.shards.survey import survey

    more: dict[str, Any] = {} if shuffle is None else {"shuffle": shuffle}
    found = survey(paths, columns=columns, workers=workers, batch_size=batch_size, rows=rows, count=count, **more)
    typer.echo(found.to_json() if as_json else text(found, *tables.width()))


def text(found: Survey, width: int = WIDTH) -> str:
    """All of a survey, in so many columns at most."""
    width = max(NARROWEST, width)
    parts = [_files(found, width), _columns(found, width), _dealing(found.dealt, width)]
    if found.first_rows:
        parts.append(_first_rows(found.first_rows, width))
    if found.advice:
        parts.append("advice\n" + "\n".join(_item(line, width) for line in found.advice))
    return "\n\n".join(parts)


def _files(found: Survey, width: int) -> str:
    from manyhands.data.shards.survey import block_word

    size = units.size
    rows = units.count(found.rows, "row") if found.rows is not None else f"about {units.count(found.about_rows, 'row')}"
    lines = [f"{units.listed(found.paths, 3)}: {found.format}, {rows}, {size(found.bytes)}"]
    if found.rows is None:
        lines.append("  rows     uncounted: whole files are dealt, unless counted=True (--count)")
    lines.append(f"  files    {found.files:,}" + _spread(found.file_bytes, size, found.files))
    word = block_word(found.format)
    where = "" if found.rows is not None else " in the first file"
    lines.append(
        f"  blocks   {units.count(found.blocks, word)}{where}"
        + _spread(found.block_rows, lambda n: f"{n:,} rows", found.blocks)
    )
    lines.append(f"           largest: {size(found.block_bytes.most)} stored, {size(found.block_memory.most)} decoded")
    lines.append(f"  a row    {size(found.row_stored)} stored, {size(found.row_decoded)} decoded")
    return "\n".join(_filled(line, width, " " * 11) for line in lines)


def _spread(spread: Spread, say: Callable[[float], str], many: int) -> str:
    """`: 98 MB to 130 MB, median 110 MB`"""
    if many == 1:
        return f": {say(spread.most)}"
    between = units.between(spread.least, spread.most, say)
    return f": {between or say(spread.most) + ' each'}" + (f", median {say(spread.median)}" if between else "")


def _columns(found: Survey, width: int) -> str:
    from manyhands.evidence.text_table import text_table

    columns = found.columns
    return text_table(
        {
            "column": [column.name or "(the array)" for column in columns],
            "type": [column.type for column in columns],
            "shape": [f"[{column.shape}]" if column.shape else "" for column in columns],
            "decoded": [units.size(column.bytes) for column in columns],
        },
        width,
        notes=("type", "shape"),
    )


def _dealing(dealt: Sharing, width: int) -> str:
    from manyhands.evidence.text_table import text_table

    size = units.size
    lines = [
        f"an epoch of {units.count(dealt.workers, 'worker')}, batches of {units.count(dealt.batch_size, 'row')}, shuffle {dealt.shuffle}"
    ]
    of = "blocks" if dealt.rows else "files"
    numbers: dict[str, tuple[Sequence[int], Callable[[float], str]]] = {
        "rows": (dealt.rows, lambda n: f"{n:,}"),
        of: (dealt.blocks, lambda n: f"{n:,}"),
        "reads": (dealt.bytes, size),
    }
    numbers = {name: (values, say) for name, (values, say) in numbers.items() if values}
    if dealt.workers <= _FEW:
        columns = {name: [say(value) for value in values] for name, (values, say) in numbers.items()}
        lines.append(text_table({"  worker": [f"  {i}" for i in range(dealt.workers)], **columns}, width))
    else:
        for name, (values, say) in numbers.items():
            lines.append(f"  each {name:<6}  {units.between(min(values), max(values), say) or say(max(values))}")
    lines.append(f"  together workers read {units.times(dealt.amplification)} the bytes of the files")
    needs = f"about {size(dealt.memory)}{_fits(dealt)}" if dealt.memory else "none of its own, the file is mapped"
    lines.append(f"  memory of a worker for reading: {needs}")
    if dealt.disk:
        lines.append(f"  disk of each host for decoded rows: about {size(dealt.disk)}")
    return "\n".join(line if "\n" in line else _filled(line, width, " " * 4) for line in lines)


def _fits(dealt: Sharing) -> str:
    if dealt.fits is None or dealt.available is None:
        return ""
    together = units.size(dealt.workers * dealt.memory)
    verdict = "fit" if dealt.fits else "do not fit"
    return f"; {together} for {units.count(dealt.workers, 'worker')} {verdict} into the {units.size(dealt.available)} that are free here"


def _first_rows(rows: Sequence[dict[str, str]], width: int) -> str:
    """As many columns as have room."""
    from manyhands.evidence.text_table import text_table

    cells = {_cut(name or "(the array)"): [_cut(row[name]) for row in rows] for name in rows[0]}
    shown: dict[str, list[str]] = {}
    used = 0
    for name, values in cells.items():
        used += max(map(len, [name, *values])) + 2
        if used > width and shown:
            break
        shown[name] = values
    more = (
        f"\n… and {units.count(len(cells) - len(shown), 'more column', 'more columns')}"
        if len(shown) < len(cells)
        else ""
    )
    return f"first rows\n{text_table(shown, width, notes=tuple(shown))}{more}"


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def _item(line: str, width: int) -> str:
    return _filled(f"- {line}", width, "  ")


def _filled(line: str, width: int, indent: str) -> str:
    """In as many lines as it takes, the further ones indented."""
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
