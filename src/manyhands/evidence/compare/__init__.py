"""The same task under several strategies: trials, significance, the report. See `compare.py`.

compare.py       what the caller asks for; trials, then findings
variants.py      what is compared, in which order
repeats.py       the trials: a warm-up, repeats in blocks, failures, Ctrl-C
trial.py         one variant trained once
probe.py         the distance of parameters from solo's, from sketches
comparison.py    the result: plain data, report.json
measures.py      numbers of trials, over repeats and along a run; metric.py: which metric judges
significance.py  means, intervals, and when two numbers are different
verdict.py       what decision and advice are made of, and the decision in words
table.py         the columns; text.py: in terminals and pull requests; report.py: in one HTML file with charts
"""
