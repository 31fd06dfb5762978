"""Files of a script that runs on several ranks: rank 0's are the run's, what another rank writes goes to a folder of
its own.

In the order of reading: `deciding` (pure: whose file a path is), `journal` (what a rank did to which path, as its peers
read it), `views` (a path as rank 0 and as another rank has it), `patches` (the functions that take paths), `settling`
(what becomes of the other ranks' files) and `meeting` (which ranks see the same files). Used by `own_loop.rank_zero`.
"""
