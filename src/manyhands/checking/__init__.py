"""The doctor: N workers of allreduce against one on a task of the user's own, and what keeps them apart. See `check.py`.

findings.py    what a check found: plain data
places.py      where in the user's files something lies
copies.py      fresh copies of a task, as real workers have them
lens.py        functions of torch seen, computed in float64, or taken away while a loss runs
arranging.py   a task as one trial wants it; what can be taken away
trials.py      the same steps alone and on N workers, step by step
batches.py     one batch, one process: what kind of mean a loss is, what draws, what changes under the hand
operations.py  the first operation in which two forward passes differ
reading.py     who reads which rows, and whether they are the same ones
building.py    models and optimizers built from the seed, and sent to other processes
judging.py     from what was seen to findings, by taking causes away one after the other
report.py      the text
check.py       the whole of it
"""
