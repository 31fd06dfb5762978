"""Engine `sim`: any number of workers in one process, in virtual time. See `engine.py` for the engine itself.

timeline.py    virtual time: programs that take turns, and what happens next
isolation.py   the state of the process that each program has for itself: random numbers, grad mode, the current worker
quantities.py  times, bandwidths and lists of options as people write them
network.py     what a message costs: links, network cards, hosts
costs.py       what a collective costs by its algorithm; collectives.py (ring, tree) and own_collectives.py (what this
               project's groups do) have the formulas
compute.py     what a gradient costs: seconds a row, jitter, stragglers
faults.py      what goes wrong, and when
rendezvous.py  what the ranks of a group share; group.py is one rank's view
server.py      the parameter server, seen by its workers; shard.py is one shard with its queue
driver_client.py each worker's line to the driver: leases, stops, events
profile.py     a measured machine, as `manyhands calibrate` writes it
"""
