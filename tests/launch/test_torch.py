"""torch.distributed rendezvous over the launcher's store, also after a restart."""

import subprocess
import sys

import pytest

from .conftest import clean_env

SCRIPT = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full([3], 1.0 + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"]:
        raise SystemExit("once more")
    os.write(1, f"sum {total.tolist()}\\n".encode())
"""


@pytest.mark.slow
def test_torch_ranks_rendezvous_again_after_a_restart(script):
    command = ["phalanx", "run", "-n", "2", "--no-prefix", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *command, script(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_env(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum [3.0, 3.0, 3.0]\n" * 2
