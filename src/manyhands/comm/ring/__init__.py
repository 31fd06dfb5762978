"""The group of workers linked by sockets: connections, the ways a sum travels, the group itself.

Engines import `group`; other groups import nothing from here but `algorithms`.
"""
