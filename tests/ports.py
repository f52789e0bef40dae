"""Ports for tests."""

import socket


def free_port():
    """Find a port of this machine that nobody listens on; another program may take it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
