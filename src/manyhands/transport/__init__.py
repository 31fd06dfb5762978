"""Channels between processes: frames of tensors over Unix sockets, or TCP with TLS.

`comm`, `server` and engines import this; it knows neither workers nor tensors' meaning.
"""
