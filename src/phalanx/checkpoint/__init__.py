"""Checkpoints that are all or nothing: durable, verified, and of any number of ranks.

::

    folder = CheckpointManager("run", keep_last=3, keep_every=1000)
    folder.save(1000, {"model": model, "optimizer": optimizer})
    folder.load(state={"model": model, "optimizer": optimizer})

The names are those of `torch.distributed.checkpoint._experimental`, and a few more. The parts, from
the top::

    _folder, _stopping          what a training loop uses; _retention: what is kept
    _builder, _config           make checkpointers
    _checkpointer               save and load
    _async_checkpointer         save while training goes on: _staging copies, and
    _checkpoint_process         another process writes; _progress: how far it is
    _checkpoint_writer, _reader with all ranks; _fitting: into a state that is there
    _verify, _upkeep            read all of it again; remove what dead saves have left
    _commit                     the protocol; _meeting, _notes, _board: how ranks hear of each other
    barriers                    how they wait for each other (_barrier_*)
    _alike, _digests            what ranks hold alike, and who writes which bytes of it
    _storage, _files, _remote   where it goes; _locks: whose turn it is; _shelf: where many go
    _manifest, _tensors         what is in the files
    _structure, _encoding       a state as a tree, and the tree as JSON
    _document, _contents        a manifest, and what it lists, as far as torch is not needed
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # On first use: the command line lists and verifies checkpoints, and has no need of torch.
    if not name.startswith("_") or name == "__all__":
        public = import_module(f"{__name__}._public")
        if hasattr(public, name):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # What is imported to make this package is no part of it; a module of it is, once it is loaded.
    public = import_module(f"{__name__}._public").__all__
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*public, *loaded})
