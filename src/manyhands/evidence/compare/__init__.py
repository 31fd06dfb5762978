"""The same task under several strategies: trials, statistics, the report. See `compare.py`.

comparison.py   what was found: plain data, report.json
compare.py      what is asked for; trials, then findings
repeating.py    the trials: a warm-up, repeats in blocks, failures, Ctrl-C
variants.py     what is compared, in which order
trials.py       one variant trained once; probe.py: parameters sketched; looking.py: the model's last look; beside.py:
beside solo's measures.py     numbers of trials and over repeats; metric.py: which metric judges; statistics.py: means,
and when two are different; means.py: what the report shows verdict.py      the decision in words; advising.py: what it
and the rules of advice see; text.py: tables for terminals report.py       one HTML file, with the modules that draw it;
markdown.py: for pull requests
"""
