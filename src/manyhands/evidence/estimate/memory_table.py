"""The memory of Spark's executors as text: a table of its parts, and the settings as options of spark-submit."""

from __future__ import annotations

from manyhands import units
from manyhands.evidence.estimate.executor_memory import ExecutorMemory
from manyhands.evidence.text_table import text_table

WIDTH = 160


def text(found: ExecutorMemory, width: int = WIDTH) -> str:
    """A block of plain text, ready to paste from `spark-submit` on."""
    columns = {
        "part": [*(part.name for part in found.parts), "in all"],
        "one": [*(units.size(part.bytes) for part in found.parts), ""],
        "in an executor": [*(str(part.count) for part in found.parts), ""],
        "together": [*(units.size(part.total) for part in found.parts), f"{found.overhead_mb:,} MiB"],
        "": [*(part.how for part in found.parts), ""],
    }
    settings = [f"  --conf {name}={value}" for name, value in found.settings.items()]
    return "\n".join(
        [
            f"{found.task}: {found.strategy} on {units.count(found.workers, 'worker')}, "
            f"{found.workers_per_executor} in an executor; resident, of a worker: {units.size(found.worker_bytes)}",
            "",
            text_table(columns, width),
            "",
            " \\\n".join(["spark-submit", *settings]),
            "",
            "spark.executor.pyspark.memory and spark.memory.offHeap.size stay unset: the first limits the addresses of "
            "each Python process, of which shared memory takes many; the second is the JVM's.",
        ]
    )
