"""What is recorded of a run: the event log, its history of numbers, the Run that comes of it, and its summary.

Training imports this.
"""
