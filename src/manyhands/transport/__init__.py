"""Channels between processes: frames of tensors over Unix sockets, or TCP with TLS."""
