"""Checkpoints and the files of a run: written whole or not at all, on a disk or at a URL, by one driver at a time.

Training, recording and the simulator import this; it knows strategies and replicas, no engine.
"""
