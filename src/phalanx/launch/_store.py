"""Hosts the store where the ranks of one attempt meet, in a process of its own.

The launcher opens the listening socket and hands it down, so the port is known before torch is
loaded and a rank that comes early waits in the socket's queue. Torch is loaded here while the
ranks load it too; the launcher itself stays small, starts at once, and ends at once.
"""

from __future__ import annotations

import signal
import socket
import sys

__all__ = ["main"]


def main() -> None:
    """Serve the store on the inherited socket until killed."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.socket(fileno=int(sys.argv[1]))
    host, port = listener.getsockname()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    signal.pause()
    del store  # it serves for as long as somebody refers to it


if __name__ == "__main__":
    main()
