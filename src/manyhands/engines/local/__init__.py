"""Engine `local`: a fork server on this machine, the processes that it forks, and what driver and process share.

Engine `hosts` runs these processes on each joined host.
"""
