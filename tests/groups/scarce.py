"""Run ranks where shared memory is scarce or unavailable. `test_shm_memory` runs this program.

It mounts tiny file systems over /dev/shm in its own mount namespace, makes the kernel refuse
memfd_create, and then forks ranks. Their results are printed to stdout as JSON.
"""

import ctypes
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore

from phalanx import native
from phalanx.errors import PhalanxError
from phalanx.groups import new_group

from .internals import Slab, share_region

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # the latter with EPERM
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
MIB = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)


def refuse_memfd():
    """Make memfd_create fail with EPERM from now on, as a sandbox may."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, MEMFD_CREATE), (0x06, 0, 0, REFUSE), (0x06, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def mount_tiny_file_systems(folder):
    """Mount 1 MiB over /dev/shm and 24 MiB over a folder, in a private mount namespace.

    Returns whether this process was allowed to.
    """
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    mounts = [["--make-rprivate", "/"]]
    mounts += [
        ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
        for place, size in (("/dev/shm", "1m"), (folder, "24m"))
    ]
    return all(subprocess.run(["mount", *each], check=False).returncode == 0 for each in mounts)


# -- rank bodies ---------------------------------------------------------------------------


def on_ranks(size, body, *args):
    """Fork ranks that call a function, and collect their return values."""
    pipes = []
    for rank in range(size):
        reading, writing = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                found = json.dumps(body(rank, size, *args))
                os.write(writing, found.encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        pipes.append(reading)
    found = []
    for reading in pipes:
        with os.fdopen(reading) as pipe:
            found.append(pipe.read())
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(size)]
    return {"statuses": statuses, "found": [json.loads(text or "null") for text in found]}


def form(rank, size, meeting, backend):
    """Form a group as a user would, and run an allreduce."""
    store = FileStore(meeting, size)
    place = {"store": store, "rank": rank, "world_size": size}
    try:
        group = new_group(backend, timedelta(seconds=20), **place)
    except PhalanxError as error:
        return {"error": type(error).__name__, "told": str(error)}
    tensor = torch.ones(300_000)
    group.allreduce(tensor).wait()
    group.shutdown()
    return {"backend": group.backend, "sum": tensor.unique().tolist()}


def form_in_containers(rank, size, meeting, backend):
    """Form a group with a rank in its own pid namespace, like containers that share /dev/shm."""
    if rank == 0:
        return form(rank, size, meeting, backend)
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWPID) == 0
    inside = on_ranks(1, lambda *_: enter_container() or form(rank, size, meeting, backend))
    return inside["found"][0]


def enter_container():
    for each in (["--make-rprivate", "/"], ["-t", "proc", "proc", "/proc"]):
        subprocess.run(["mount", *each], check=True)


def form_with_file_size_limit(rank, size, meeting, backend):
    """Form a group with RLIMIT_FSIZE set to 1 MiB, which needs no privilege."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    return form(rank, size, meeting, backend)


def exhaust(rank, size, meeting, folder):
    """Allocate until the file system is full, in a slab larger than the file system."""
    sizes = native.engine.Sizes()
    sizes.small, sizes.window, sizes.channel, sizes.slab = 1024, 4096, 4096, 256 * MIB
    engine = share_region(FileStore(meeting, size), rank, size, sizes=sizes, places=[folder])
    slab = Slab(engine, rank)
    kept, told = [], ""
    while not told:
        try:
            kept.append(slab.allocate((MIB,), torch.uint8).fill_(len(kept)))
        except PhalanxError as error:
            told = f"{type(error).__name__}: {error}"
    intact = [bool((tensor == number).all()) for number, tensor in enumerate(kept)]
    kept.pop()
    kept.append(slab.allocate((MIB,), torch.uint8).fill_(1))  # what was freed can be had again
    return {"told": told, "got": len(kept), "intact": all(intact)}


def main():
    """Print the results of the ranks; fewer cases if this process may not mount."""
    folder, rich = Path(sys.argv[1]), Path(sys.argv[2])
    results = {"within a limit": on_ranks(2, form_with_file_size_limit, str(rich / "limit"), "shm")}
    if mount_tiny_file_systems(str(folder)):
        results["containers"] = on_ranks(2, form_in_containers, str(rich / "containers"), "auto")
        results["exhausted"] = on_ranks(1, exhaust, str(rich / "0"), str(folder))
        refuse_memfd()
        tempfile.tempdir = str(rich)
        results["a file will do"] = on_ranks(2, form, str(rich / "1"), "shm")
        left = [path.name for place in (rich, Path("/dev/shm")) for path in place.glob("phalanx*")]
        tempfile.tempdir = str(folder)
        (folder / "filler").write_bytes(bytes(23 * MIB))
        results["nowhere"] = on_ranks(2, form, str(rich / "2"), "shm")
        results["another engine"] = on_ranks(2, form, str(rich / "3"), "auto")
        left += [
            path.name for place in (folder, Path("/dev/shm")) for path in place.glob("phalanx*")
        ]
        results["left"] = left
    print(json.dumps(results))


if __name__ == "__main__":
    main()
