"""The programs, and the ways to launch them."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ACCELERATE_SCRIPTS = "accelerate.test_utils.scripts"


class Mode(enum.StrEnum):
    """What runs a program; the columns of the tables."""

    GLOO = "torchrun + Gloo"
    RUN = "phalanx run"
    DROP_IN = "drop-in"


class Launcher(enum.StrEnum):
    """Who starts the ranks: with drop-in an option of ours, a variable for the others."""

    PHALANX = "phalanx run"
    TORCHRUN = "torchrun"
    SCRIPT = "the script"
    """The framework itself, on behalf of the script that was started as rank 0."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that this launcher has."""
        return tuple(Mode) if self is Launcher.PHALANX else (Mode.GLOO, Mode.DROP_IN)


@dataclass(frozen=True)
class Program:
    """A program and what to expect of it."""

    framework: str
    target: tuple[str, ...]
    """A script and its arguments, or ``-m`` and a module."""
    cases: tuple[str, ...] = ()
    """What it reports; without any, only its exit status and its time are known."""
    ranks: int = 2
    launcher: Launcher = Launcher.PHALANX
    has_ddp: bool = True
    """Whether the reported cases use DDP, which drop-in replaces."""

    @property
    def title(self) -> str:
        """The name of the file that runs, and its arguments."""
        if self.target[0] == "-m":
            return self.target[1].rpartition(".")[2]
        return " ".join([Path(self.target[0]).stem, *self.target[1:]])


def _script(name: str, *args: str) -> tuple[str, ...]:
    return (str(PROGRAMS / name), *args)


_HOOKS = tuple(f"Accelerate, {name} hook" for name in ("fp16", "PowerSGD"))
_LIGHTNING = ("BoringModel", "ManualOptimBoringModel", "accumulation", "checkpoint, resumed")
_TRAINER = ("Trainer, GPT-2", "Trainer, gradient checkpointing")

REPORTING = (
    Program("torch", _script("torch_ddp.py"), ("torch DDP",)),
    Program("torch", _script("torch_ddp.py"), ("torch DDP",), launcher=Launcher.TORCHRUN),
    Program("Accelerate", _script("accelerate_loop.py"), ("Accelerate loop",)),
    Program("Accelerate", _script("accelerate_hooks.py"), _HOOKS),
    Program("Lightning", _script("lightning_trainer.py"), _LIGHTNING),
    Program("Lightning", _script("lightning_trainer.py"), _LIGHTNING, launcher=Launcher.SCRIPT),
    Program("Lightning", _script("lightning_fabric.py"), ("Fabric",)),
    Program("Lightning", _script("lightning_fabric.py"), ("Fabric",), launcher=Launcher.SCRIPT),
    Program("Transformers", _script("transformers_trainer.py"), _TRAINER),
    *(
        Program("2-D mesh", _script("titan.py", axis), (f"2-D mesh, {axis}",), 4, has_ddp=False)
        for axis in ("replicate", "shard")
    ),
)
"""Our programs, which use the frameworks as their manuals do and report losses and times."""

THIRD_PARTY = tuple(
    Program("Accelerate", ("-m", f"{ACCELERATE_SCRIPTS}.{name}"))
    for name in (
        "test_script", "test_sync", "test_ops", "test_merge_weights", "test_ddp_comm_hook",
    )
)  # fmt: skip
"""Programs from the installed packages: they assert, and report nothing."""


def command(program: Program, mode: Mode) -> list[str]:
    """Return the command that runs a program in a mode."""
    python, ranks = sys.executable, str(program.ranks)
    if program.launcher is Launcher.SCRIPT:
        return [python, *program.target]
    if mode is Mode.GLOO or program.launcher is Launcher.TORCHRUN:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", ranks, *program.target]
    drop_in = ["--drop-in"] if mode is Mode.DROP_IN else []
    return [python, "-m", "phalanx", "run", "-n", ranks, *drop_in, *program.target]


def environment(program: Program, mode: Mode) -> dict[str, str]:
    """Return the environment of a run: nothing of a launcher around us, one thread per rank."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "PHALANX_")
    others = ("ACCELERATE_", "PL_", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours + others)}
    kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if mode is Mode.GLOO or program.launcher is not Launcher.PHALANX:
        kept["ACCELERATE_USE_CPU"] = "true"  # phalanx run sets it
    if mode is Mode.DROP_IN and program.launcher is not Launcher.PHALANX:
        kept["PHALANX_DROP_IN"] = "1"
    return kept


def in_rotation(modes: Sequence[Mode], turn: int) -> list[Mode]:
    """Return the modes, another one first at each turn."""
    start = turn % len(modes)
    return [*modes[start:], *modes[:start]]
