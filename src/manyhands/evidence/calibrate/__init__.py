"""`calibrate()`: measure a task's costs on this machine, as a profile for engine `sim`. For `cli`, `estimate`, users.

calibrate.py   the entry, and the comparison of predicted and measured steps
measure.py     the times of groups, server and leases
coding.py      the times of codecs
observe.py     runs of the training loop on real or simulated workers
fit.py         from samples to the simulator's constants; pure
report.py      a calibration as text
"""
