"""Files of a script on several ranks: rank 0's are the run's, what another rank writes goes to a folder of its own.

In the order of reading: `file_owner` (pure: whose file a path is), `folder` (what ranks share on disk: journals, locks,
copies), `views` (a path as rank 0 and as another rank has it), `patches` (the functions that take paths), `merge` (what
becomes of the other ranks' files) and `rendezvous` (which ranks see the same files). Used by `own_loop.rank_zero`.
"""
