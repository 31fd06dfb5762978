"""Engine `sim`: any number of workers in one process, in virtual time. See `engine.py` for the engine itself.

timeline.py       virtual time: programs that take turns, and the events that are due
isolation.py      the state of the process that each program has for itself: random numbers, grad mode, current worker
quantities.py     times, bandwidths and lists of options as people write them
network.py        the cost of a message: links, network cards, hosts
costs.py          the cost of a collective, by this project's groups; ring and tree are in collectives.py
compute.py        the cost of a gradient: seconds a row, jitter, stragglers
faults.py         what fails, and when
rendezvous.py     what the ranks of a group share; group.py is one rank's view
server.py         the parameter server, seen by its workers; shard.py is one shard with its queue
driver_client.py  each worker's connection to the driver: leases, stops, events
profile.py        a measured machine, as `manyhands calibrate` writes it

Only `engines` and `evidence` import it.
"""
