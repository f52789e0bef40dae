"""Location of a late rank: the line of user code, and what that line waits for."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from phalanx.errors import CollectiveTimeout

from .internals import describe_frame, process_state

SLOW = 3  # with two workers, this sample is worker 1's
HERE = r"groups/test_rank_locations\.py:\d+ in "
LIBRARY = r", inside python3\.\d+/\w+\.py:\d+ in \w+"


class Blocking(Dataset):
    """A dataset with one sample that blocks until a byte is written to a pipe."""

    def __init__(self, *, stops):
        self.stops = stops
        self.reader, self.writer = os.pipe()
        self.news, self.herald = os.pipe()

    def __len__(self):
        return 2 * SLOW

    def __getitem__(self, index):
        if index == SLOW:
            os.write(self.herald, str(os.getpid()).encode())
            if self.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            os.read(self.reader, 1)
        return index


def load(data, in_order):
    for _ in DataLoader(data, num_workers=2, in_order=in_order):
        pass


def load_while_others_wait(ctx, stops, in_order):
    group = ctx.group()
    if ctx.rank == 1:
        data = Blocking(stops=stops)

        def release():
            pid = int(os.read(data.news, 20))
            while stops and process_state(pid) != "stopped":
                time.sleep(0.001)
            ctx.store.set("blocked", "")
            ctx.store.wait(["told"])
            os.write(data.writer, b"x")
            os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=release)
        thread.start()
        load(data, in_order)
        thread.join()
        for end in (data.reader, data.writer, data.news, data.herald):
            os.close(end)
        return None
    ctx.store.wait(["blocked"])
    with pytest.raises(CollectiveTimeout) as caught:
        group.allreduce(torch.ones(1), timeout=timedelta(seconds=0.7)).wait()
    ctx.store.set("told", "")
    return caught.value.reports[1].here


@pytest.mark.parametrize(
    ("stops", "in_order", "worker"),
    [
        (False, True, r"DataLoader worker 1 \(pid \d+, alive\)"),
        (True, True, r"DataLoader worker 1 \(pid \d+, stopped\)"),
        (False, False, r"any of 2 DataLoader workers"),
    ],
)
def test_a_hang_in_a_data_loader_names_the_worker(ranks, stops, in_order, worker):
    told, _ = ranks.run(load_while_others_wait, 2, args=(stops, in_order), timeout=20)
    assert re.fullmatch(f"{HERE}load{LIBRARY}, waiting for {worker}", told), told


def test_a_wait_inside_a_library_is_located_in_user_code():
    release, said = threading.Event(), None
    thread = threading.Thread(target=lambda: release.wait(60))
    thread.start()
    try:
        until = time.monotonic() + 20
        while not (said or "").endswith("in wait") and time.monotonic() < until:
            said = describe_frame(sys._current_frames().get(thread.ident))
    finally:
        release.set()
        thread.join()
    assert re.fullmatch(f"{HERE}<lambda>, inside python3\\.\\d+/threading\\.py:\\d+ in wait", said)


def test_a_frame_in_user_code_is_described_without_a_library():
    assert re.fullmatch(f"{HERE}test_a_frame_\\w+", describe_frame(sys._getframe()))
    assert describe_frame(None) is None


def test_process_state_is_alive_stopped_or_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_state(child.pid) == "alive"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid) == "stopped"
    finally:
        child.kill()
        child.communicate()
    assert process_state(child.pid) == "dead"
