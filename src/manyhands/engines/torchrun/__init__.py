"""Engine `torchrun`: this process is a worker already, started by torchrun, mpirun or srun.

`launchers` knows their variables and imports nothing heavy.
"""
