"""Lines of user code: the one that made a call, and the one that a rank is executing.

User code is everything outside phalanx and torch.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

import torch

from ._peers import process_state

_INTERNAL_PREFIXES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)
_DATALOADER_FILE = str(Path(torch.__file__).parent / "utils" / "data" / "dataloader.py")
_STDLIB_PREFIXES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
    "<frozen ",
)
known_files: dict[str, bool] = {}
"""Files from which calls came, and whether they belong to phalanx or torch."""


def user_site() -> str:
    """Return the line of the user's code that is calling."""
    frame = user_frame(sys._getframe(1))
    return format_site(frame.f_code, frame.f_lasti)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's code that is calling."""
    frame = user_frame(sys._getframe(1))
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def describe_frame(frame: FrameType | None) -> str | None:
    """Return where in the user's code a running thread is: ``train.py:44 in load``.

    If that code waits inside a library, the library's line is added; for a data loader, also the
    worker process that it waits for.
    """
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    outside = [each for each in frames if not _is_internal(each.f_code.co_filename)]
    if not outside:
        return None
    own = [each for each in outside if not _is_library(each.f_code.co_filename)] or outside
    here = _describe(own[0])
    if own[0] is not outside[0]:
        here = f"{here}, inside {_describe(outside[0])}"
    worker = _awaited_worker(frames)
    return here if worker is None else f"{here}, waiting for {worker}"


def _describe(frame: FrameType) -> str:
    return f"{format_site(frame.f_code, frame.f_lasti)} in {frame.f_code.co_name}"


def _awaited_worker(frames: Sequence[FrameType]) -> str | None:
    """Return the process from which a `DataLoader` awaits a batch, and its state."""
    for frame in frames:
        if frame.f_code.co_filename == _DATALOADER_FILE and frame.f_code.co_name == "_get_data":
            # These attributes are private to torch; without them the description is shorter.
            with suppress(AttributeError, IndexError, KeyError, TypeError):
                loader = frame.f_locals["self"]
                if not loader._in_order:
                    return f"any of {len(loader._workers)} DataLoader workers"
                (number,) = loader._task_info[loader._rcvd_idx]
                pid = loader._workers[number].pid
                return f"DataLoader worker {number} (pid {pid}, {process_state(pid)})"
    return None


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame of user code, or else the outermost of all."""
    while _is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_internal(filename: str) -> bool:
    known = known_files.get(filename)
    if known is None:
        known = known_files[filename] = filename.startswith(_INTERNAL_PREFIXES)
    return known


def _is_library(filename: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return bool(installed) or filename.startswith(_STDLIB_PREFIXES)


def format_site(code: CodeType, instruction: int) -> str:
    """Return file and line; the last two parts of the path identify a file well enough."""
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            number = line
    return f"{os.sep.join(code.co_filename.rsplit(os.sep, 2)[-2:])}:{number}"
