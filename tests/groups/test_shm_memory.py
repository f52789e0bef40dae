"""Memory of the shm backend: access by other users, where it is allocated, and its release."""

import gc
import json
import os
import random
import resource
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from phalanx import native
from phalanx.errors import CollectiveTimeout, InvalidState

from .internals import _shm_region, share_region
from .test_shm_deaths import regions, settled

pytestmark = pytest.mark.skipif(native.engine is None, reason="the engine was not built")

LONG = timedelta(seconds=60)
MIB = 1 << 20


# -- a second user -------------------------------------------------------------------------

NOBODY = 65534
SPY = """
import os, sys
path, pid = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
open(f"/proc/{pid}/stat").close()  # what anybody may read
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(path, flags)
        sys.exit(f"opened {path}")
    except PermissionError:
        pass
"""


def be_spied_on(ctx, place):
    """Share a region with a slow peer, while another user tries to open it.

    Its path can be read from the store.
    """
    if ctx.rank == 1:
        ctx.store.wait(["spied"])
    sizes = native.engine.Sizes()
    sizes.slab = MIB
    shared = []
    forming = threading.Thread(
        target=lambda: shared.append(
            share_region(ctx.store, ctx.rank, 2, sizes=sizes, places=[place])
        )
    )
    forming.start()
    if ctx.rank == 0:
        own = ctx.store.clone()  # a connection: the other is busy
        spy_on(json.loads(own.get("offer/0"))["path"])
        ctx.store.set("spied", "")
    forming.join()
    assert shared


def spy_on(path):
    """Try to open a region as another user; without the privilege, check the modes only."""
    mine = os.geteuid()
    if mine == 0:
        spy = subprocess.run(
            [sys.executable, "-I", "-c", SPY, path, str(os.getpid())],
            capture_output=True,
            text=True,
            check=False,
        )
        assert spy.returncode == 0, spy.stderr
    # A memfd can be reached only through its owner's /proc/<pid>/fd.
    gate = os.stat(os.path.dirname(path) if path.startswith("/proc/") else path)
    assert (gate.st_uid, stat.S_IMODE(gate.st_mode) & 0o077) == (mine, 0)


@pytest.mark.parametrize("place", ["memfd", "/dev/shm"])
def test_another_user_cannot_open_a_region_that_is_being_shared(ranks, place):
    ranks.run(be_spied_on, 2, args=(place,))


def test_a_region_of_another_user_is_not_mapped(tmp_path):
    """Another user with write access to the store could offer one."""
    sizes = native.engine.Sizes()
    sizes.slab = MIB
    region = native.engine.Region.create(str(tmp_path), 2, sizes)
    if os.geteuid() == 0:
        os.chown(region.path, NOBODY, NOBODY)
        with pytest.raises(RuntimeError, match="is not this group's region"):
            native.engine.Region.open(region.path, region.token, 2, sizes)
        os.chown(region.path, 0, 0)
    native.engine.Region.open(region.path, region.token, 2, sizes)
    region.unlink()


# -- scarce memory -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scarce(tmp_path_factory):
    """Results of ranks on a machine with hardly any shared memory; see `scarce.py`."""
    folders = [tmp_path_factory.mktemp(name) for name in ("tiny", "rich")]
    told = subprocess.run(
        [sys.executable, "-m", "groups.scarce", *folders],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def found_by_ranks(scarce, what):
    if what not in scarce:
        pytest.skip("this user may not mount a file system of its own")
    assert set(scarce[what]["statuses"]) == {0}, "a signal, such as SIGBUS, ended a rank"
    return scarce[what]["found"]


def test_a_file_is_used_if_dev_shm_is_small_and_memfd_is_denied(scarce):
    expected = {"backend": "shm", "sum": [2.0]}
    assert found_by_ranks(scarce, "a file will do") == [expected] * 2
    assert scarce["left"] == []


def test_every_rank_reports_why_no_shared_memory_is_available(scarce):
    one, other = found_by_ranks(scarce, "nowhere")
    assert one == other
    assert one["error"] == "RendezvousError"
    assert "memfd_create: Operation not permitted" in one["told"]
    assert "/dev/shm: No space left on device" in one["told"]
    assert one["told"].count("No space left on device") == 2


def test_every_rank_reports_a_file_size_limit(scarce):
    one, other = found_by_ranks(scarce, "within a limit")
    assert one == other
    assert one["error"] == "RendezvousError"
    assert one["told"].count("File too large") == 3


def test_auto_falls_back_to_gloo_without_shared_memory(scarce):
    expected = {"backend": "gloo", "sum": [2.0]}
    assert found_by_ranks(scarce, "another engine") == [expected] * 2


def test_auto_falls_back_to_gloo_across_pid_namespaces(scarce):
    """Containers may share files while a pid means different processes, so deaths go unseen."""
    expected = {"backend": "gloo", "sum": [2.0]}
    assert found_by_ranks(scarce, "containers") == [expected] * 2


def test_allocate_raises_when_memory_is_exhausted(scarce):
    (found,) = found_by_ranks(scarce, "exhausted")
    assert found["told"].startswith("InvalidState: no shared memory for 1048576 bytes")
    assert "No space left on device" in found["told"]
    assert found["intact"]
    assert 10 < found["got"] < 24, "all of it, and not more"


# -- release -------------------------------------------------------------------------------


def shared_bytes():
    """Return the resident size of the regions that this process has mapped."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.partition(" ")[0].endswith(":"):  # the line that begins a mapping
            counts = "memfd:phalanx" in line
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def give_memory_back(ctx):
    before = regions()
    group = ctx.group("shm", timeout=LONG)
    empty = shared_bytes()
    tensor = group.allocate((8 * MIB,))
    assert shared_bytes() == empty + 32 * MIB
    view = tensor[MIB:].view(7, MIB)
    del tensor
    gc.collect()
    assert shared_bytes() == empty + 32 * MIB, "a view keeps it"
    view.fill_(3)
    group.shutdown()
    del group
    ctx.leave_open()
    gc.collect()
    assert view.unique().tolist() == [3.0], "it outlives its group"
    del view
    assert settled(before), "a region is left over"


def test_memory_is_released_when_the_last_view_is_dropped(ranks):
    ranks.run(give_memory_back, 1)


def allocate_on_threads(ctx):
    """Allocate and drop tensors of one group on several threads; no two may overlap."""
    group = ctx.group("shm", timeout=LONG)
    taken, clashes = set(), []

    def work(seed):
        chance = random.Random(seed)
        kept = []
        for _ in range(3_000):
            tensor = group.allocate((chance.choice([10, 2_000]),))
            pages = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 4096)
            clashes.extend(taken.intersection(pages))
            taken.update(pages)
            kept.append((tensor, pages))
            if len(kept) > 5:
                tensor, pages = kept.pop(chance.randrange(len(kept)))
                taken.difference_update(pages)
        for _, pages in kept:
            taken.difference_update(pages)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not clashes
    gc.collect()
    slab = group._engine._slab
    slab.allocate((1,), torch.uint8)
    assert len(slab._free) == 1, "all pieces are one again"


def test_several_threads_can_allocate_concurrently(ranks):
    ranks.run(allocate_on_threads, 1)


def fill_the_slab(ctx):
    """Use up the address range of a slab."""
    group = ctx.group("shm", timeout=LONG)
    slab = group._engine._slab
    slab._free = [(0, 4 * MIB)]
    kept = [group.allocate((MIB,), torch.uint8) for _ in range(4)]
    with pytest.raises(InvalidState, match=r"no room for 4096 bytes.*Free tensors"):
        group.allocate((1,))
    del kept[1]
    again = group.allocate((MIB // 4,)).fill_(1)
    assert again.data_ptr() == kept[0].data_ptr() + MIB


def test_a_full_slab_raises_and_is_reused_after_free(ranks):
    ranks.run(fill_the_slab, 1)


@pytest.mark.parametrize(("mode", "is_there"), [("0\n", False), ("2\n", True)])
def test_memory_is_committed_up_front_without_overcommit(mode, is_there, tmp_path, monkeypatch):
    setting = tmp_path / "overcommit_memory"
    setting.write_text(mode)
    monkeypatch.setattr(_shm_region, "OVERCOMMIT_SETTING", setting)
    region = _shm_region.make_region("memfd", 2)
    _, slab = region.slab(0)
    found = os.stat(region.path)
    taken = found.st_blocks * 512
    assert (taken == found.st_size - 2 * slab) is is_there
    assert taken < MIB or is_there


# -- messages too large to buffer ----------------------------------------------------------


@contextmanager
def memory_left(nbytes):
    """Let this process map at most this many more bytes in the body."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def receive_more_than_fits_in_memory(ctx):
    group = ctx.group("shm", timeout=LONG)
    length = 96 * MIB
    if ctx.rank == 0:
        large = torch.arange(length // 8)
        works = [group.send(large, 1, tag=1), group.send(torch.full((4,), 7.0), 1, tag=2)]
        ctx.store.set("sent", "")
        for work in works:
            work.wait()
        return None
    ctx.store.wait(["sent"])
    large, small = torch.zeros(length // 8, dtype=torch.int64), torch.zeros(4)
    with memory_left(length // 2):
        work = group.recv(small, 0, tag=2)
        told = rf"recv float32\[4\] at .*message of {length} bytes from rank 0"
        with pytest.raises(MemoryError, match=told):
            work.wait()
        assert not work.is_completed()
        future = work.get_future()  # which waits until there is memory, or nothing in the way
        group.recv(large, 0, tag=1).wait()  # which needs none
        future.wait()
        work.wait()
    assert torch.equal(large, torch.arange(length // 8))
    return small.tolist()


def test_an_unexpected_message_without_memory_raises_and_is_kept(ranks):
    assert ranks.run(receive_more_than_fits_in_memory, 2)[1] == [7.0] * 4


def receive_from_any_source_beside_a_large_message(ctx):
    group = ctx.group("shm", timeout=LONG)
    length = 96 * MIB
    if ctx.rank == 0:
        work = group.send(torch.arange(length // 8), 2, tag=1)
        ctx.store.set("sent", "")
        work.wait()
        return None
    if ctx.rank == 1:
        ctx.store.wait(["starved"])
        group.send(torch.full((4,), 7.0), 2, tag=2).wait()
        return None
    ctx.store.wait(["sent"])
    large, small = torch.zeros(length // 8, dtype=torch.int64), torch.zeros(4)
    with memory_left(length // 2):
        work = group.recv_anysource(small, tag=2)
        with pytest.raises(CollectiveTimeout):  # rank 0 is held up, and rank 1 is not
            work.wait(timedelta(milliseconds=50))
        ctx.store.set("starved", "")
        work.wait()
        group.recv(large, 0, tag=1).wait()
    return small.tolist()


def test_recv_anysource_is_not_blocked_by_one_rank(ranks):
    assert ranks.run(receive_from_any_source_beside_a_large_message, 3)[2] == [7.0] * 4
