"""Predict time, efficiency and bytes of strategies on more workers than there are, by the calibrated simulator.

estimate.py   what people call: one row for each strategy on each number of workers
bars.py       how far off a prediction may be
shape.py      what of the real model, optimizer and data decides what a step takes
stand_in.py   a task with a tiny model that takes its place
lengths.py    what the stand-in's messages stand for
scaled.py     the simulator, in which they cost what the real ones would
steady.py     when the mean of a step is known well enough
table.py      the estimates as text
"""
