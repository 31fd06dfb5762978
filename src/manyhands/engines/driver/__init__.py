"""The driver of a run: it starts the processes of all hosts, watches them, and decides what a silence or an end means.

Engines import this; workers do not.
"""
