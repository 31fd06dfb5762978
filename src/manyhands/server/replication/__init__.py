"""Copies of a server shard: what the primary sends to its backup, and who is which. For `server`'s users in `engines`,
which start the processes. The log and the views are pure; `copy_host` serves a copy in a process."""
