"""What a worker of an elastic run sends to its supervisor."""

import json
import socket

from phalanx.elastic import _elastic_worker
from phalanx.elastic._elastic_worker import SupervisorChannel


def test_a_supervisor_that_does_not_read_misses_progress_but_no_other_event(monkeypatch):
    """One that is suspended (Ctrl-Z) must learn later that the run has finished."""
    monkeypatch.setattr(_elastic_worker, "PROGRESS_INTERVAL", 0.0)
    supervisor, worker = socket.socketpair()
    worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel = SupervisorChannel(worker.detach(), changed_variables=[])
    channel.is_leader = True
    for step in range(20):
        channel.tell_progress(step)
    channel.tell("finished")
    with supervisor:
        events = [json.loads(line)["event"] for line in supervisor.recv(1 << 16).splitlines()]
        assert events == ["created", "finished"]
        channel.tell_progress(20)
        assert json.loads(supervisor.recv(1 << 16))["step"] == 20
