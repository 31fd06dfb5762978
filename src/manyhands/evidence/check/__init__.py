"""The doctor: N workers of allreduce against one on a task of the user's own, and what keeps them apart.

findings.py    what a check found: plain data
places.py      where in the user's files something lies
copies.py      fresh copies of a task, as real workers have them
effects.py     functions of torch that break equality, and what to do in their place; lens.py puts that between them and
               the user's code, and computes in float64
arranging.py   a task as one trial wants it: all that can be taken away; sizes.py: which batches
watching.py    allreduce as it is, with what goes through it written down; trials.py: the same steps alone and on N workers
batches.py     one batch in one process, and what kind of mean a loss is; operations.py: the first operation that differs
reading.py     what workers read; rows.py: whether each row comes once, and slices are cut from what one worker reads
building.py    models and optimizers as workers build them
examining.py   what is suspected of a batch; losses.py: of its loss and metrics; asking.py: of who asks for its rank
looking.py     all of this together
proving.py     the proofs
judging.py     from suspects to findings, by taking them away
report.py      the text
check.py       the whole of it
"""
