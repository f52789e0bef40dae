"""Hosts the TCPStore of one attempt in a separate process.

Run by the launcher with ``-m``. The launcher opens the listening socket and passes it down, so
the port is known before torch is imported, and a rank that connects early waits in the socket's
backlog. The launcher itself never imports torch.

A scheduler may signal every process of a job. Ranks that save and leave then need the
store, so it ignores these signals. The launcher, or the orphan guard, ends it by SIGKILL.
"""

from __future__ import annotations

import signal
import socket
import sys


def main() -> None:
    """Serve the store on the inherited socket until killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from torch._C._distributed_c10d import TCPStore

    listener = socket.socket(fileno=int(sys.argv[1]))
    host, port = listener.getsockname()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    signal.pause()
    del store  # it serves while it is referenced


if __name__ == "__main__":
    main()
