"""The files that a DataFrame reads, if it is a plain read of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from manyhands.data.readers.shared_files import table_file
from manyhands.engines.spark.session import is_connect
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_READ = {
    "org.apache.spark.sql.execution.datasources.LogicalRelation",
    "org.apache.spark.sql.execution.datasources.HadoopFsRelation",
    "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",  # not Delta's, whose files hold removed rows
}
_FIELDS = 10  # that an error lists of a plan


def files_of(df: DataFrame) -> tuple[str, ...]:
    """The URLs of the Parquet files that a DataFrame reads, sorted.

    Raises BadInput if it does more than read them: a filter or a computed column would be lost silently.
    """
    if is_connect(df.sparkSession):
        raise BadInput("over Spark Connect the plan of a DataFrame is not visible: give the paths of the files instead")
    plan = _below_names(df._jdf.queryExecution().analyzed())
    if not _is_read(plan):
        raise BadInput(
            "input='files' takes a DataFrame that is nothing but a read of Parquet files, and this one has "
            f"{plan.simpleString(_FIELDS)!r} in its plan, which would be lost: leave input out, or write the DataFrame and "
            "give the path"
        )
    files = tuple(sorted(unquote(url) for url in df.inputFiles()))
    for file in files:
        table_file(file)
    return files


def _below_names(plan: Any) -> Any:
    """The plan without nodes that only name a table or select columns unchanged."""
    while plan.nodeName() == "SubqueryAlias" or (plan.nodeName() == "Project" and _chooses(plan)):
        plan = plan.child()
    return plan


def _chooses(project: Any) -> bool:
    columns = project.projectList()
    return all(_class(columns.apply(i)).endswith(".AttributeReference") for i in range(columns.length()))


def _is_read(plan: Any) -> bool:
    if _class(plan) not in _READ:
        return False
    relation = plan.relation()
    return _class(relation) in _READ and _class(relation.fileFormat()) in _READ


def _class(thing: Any) -> str:
    return str(thing.getClass().getName())
