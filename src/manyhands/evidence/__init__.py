"""Everything that measures instead of trains: compare, check, estimate, calibrate, replay, and the rules of advice.

The command imports these; nothing that trains does, but for `advise`, which `Run.summary` prints.
"""
