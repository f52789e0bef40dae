"""The private names that tests of this package use; everything else is public."""

from phalanx.groups import (
    _backend_registry,
    _issuer,
    _membership,
    _store,
    _torch_integration,
    _worker_threads,
)
from phalanx.groups._call_site import describe_frame, user_frame
from phalanx.groups._engine import (
    CallFailed,
    EngineMismatch,
    EngineStopped,
    PeerDead,
    is_peer_failure,
)
from phalanx.groups._fast_path import configure_fast_path
from phalanx.groups._flight_recorder import FlightRecorder
from phalanx.groups._membership import RejoinBarrier
from phalanx.groups._peers import PeerProcess, Roster, process_state
from phalanx.groups._reductions import averaging
from phalanx.groups._rendezvous import Rendezvous
from phalanx.groups._status_store import StatusStore
from phalanx.groups._store import RESERVATION_PREFIX, ClosedGroup, StoreClient
from phalanx.groups._timing import Timing, override_timing
from phalanx.groups._work import Work
from phalanx.groups._worker_threads import run_on_worker
from phalanx.groups.backends import _shm_region
from phalanx.groups.backends._shm_region import Slab, share_region, shared_core_count, watch_peers

__all__ = [
    "RESERVATION_PREFIX",
    "CallFailed",
    "ClosedGroup",
    "EngineMismatch",
    "EngineStopped",
    "FlightRecorder",
    "PeerDead",
    "PeerProcess",
    "RejoinBarrier",
    "Rendezvous",
    "Roster",
    "Slab",
    "StatusStore",
    "StoreClient",
    "Timing",
    "Work",
    "_backend_registry",
    "_issuer",
    "_membership",
    "_shm_region",
    "_store",
    "_torch_integration",
    "_worker_threads",
    "averaging",
    "configure_fast_path",
    "describe_frame",
    "is_peer_failure",
    "override_timing",
    "process_state",
    "run_on_worker",
    "share_region",
    "shared_core_count",
    "user_frame",
    "watch_peers",
]
