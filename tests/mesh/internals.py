"""The private names that tests of this package use; everything else is public."""

from phalanx.groups import _backend_registry
from phalanx.groups._backend_registry import Backend
from phalanx.mesh import _mesh_resources
from phalanx.mesh._drawing import MeshView, visible_positions
from phalanx.mesh._plan import plan_mesh
from phalanx.mesh._root_state import RootState

__all__ = [
    "Backend",
    "MeshView",
    "RootState",
    "_backend_registry",
    "_mesh_resources",
    "plan_mesh",
    "visible_positions",
]
