"""`estimate()`: predict time, efficiency and bytes on more workers than there are. For `cli` and users.

estimate.py         the entry: one row for each strategy on each number of workers
model_sizes.py      the sizes of the real model, optimizer state and data
message_lengths.py  the real lengths of the stand-in's messages
scaled_task.py      the stand-in task, and its simulation at the real costs
steady_state.py     stops the simulation when the mean of a step is known
bars.py             error bars
table.py            the estimates as text
executor_memory.py  another entry: the memory of Spark's executors, and the settings that give it
"""
