"""Ports for tests."""

import socket


def free_port():
    """Return a free local port; another program may take it before it is used."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
