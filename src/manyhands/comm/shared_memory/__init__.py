"""The group of workers on one host: mapped memory, how workers wait for each other in it, the collectives.

Engines import `group`.
"""
