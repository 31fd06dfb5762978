"""`check()`: prove that N workers of allreduce equal one on a task, or name what keeps them apart. For `cli`, users.

check.py             the entry, and the two proofs
inspection.py        what can be checked without training: rows.py the data, then model and optimizer,
                     examination.py one batch twice, losses.py whether loss and metrics are means
diagnosis.py         from suspects to findings, by trials with causes removed
trials.py            the same steps on one worker and on N, recorded and compared
copies.py            independent copies of a task, and its configuration for a trial
interventions.py     intercepts functions of torch: records, replaces, logs them
source_locations.py  where something is in the user's files
report.py            the result, as data and as text
"""
