"""The command `manyhands`: one module a family of commands. It parses, calls the library and prints.

Only `__main__` imports this.
"""
