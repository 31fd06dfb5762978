"""Calibration: this machine measured, as a profile that engine `sim` takes. See `calibrate.py`.

fit.py         from samples to the constants of the simulator's model; pure
observe.py     runs of the real loop, on real workers and simulated ones, as times of ticks
measure.py     what groups, server and leases take on this machine
calibrate.py   the whole of it, and the comparison of prediction and truth
"""
