"""Engine `hosts`: the driver listens, other hosts join, each runs its own processes and reports over TLS.

Engine `spark` uses the same parts for its executors.
"""
