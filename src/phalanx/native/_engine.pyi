"""The module that `native/bindings.cpp` defines."""

from collections import deque
from threading import Lock
from typing import Any

from torch import Tensor

from phalanx.groups._flight_recorder import Call, FlightRecorder
from phalanx.groups._work import Work

MAX_RANKS: int
MAX_TREE_INPUTS: int
DTYPES: dict[str, int]  # by torch's names, in the order of their numbers

class ReduceOp:
    SUM: int
    AVG: int
    PRODUCT: int
    MIN: int
    MAX: int
    BAND: int
    BOR: int
    BXOR: int
    PREMUL_SUM: int

class Collective:
    BARRIER: int
    ALLREDUCE: int
    REDUCE: int
    BROADCAST: int
    ALLGATHER: int
    GATHER: int
    SCATTER: int
    REDUCE_SCATTER: int
    ALLTOALL: int
    ORDERED_ALLREDUCE: int

class Outcome:
    PENDING: int
    FINISHED: int
    DEAD: int
    MISMATCH: int
    ABORTED: int
    ROOT_LEFT: int
    TORN: int

class TransferState:
    PENDING: int
    FINISHED: int
    WRONG_SIZE: int
    CANCELLED: int
    STARVED: int
    STOPPED: int

class RejoinStage:
    OUTSIDE: int
    WAITING: int
    ENTERING: int
    ENTERED: int

def park_dying_threads() -> None: ...
def instruction_set() -> str: ...
def flatten(
    into: int, tensors: list[Any], views: list[Any], sizes: list[int], type: int, factor: float
) -> bool: ...
def fold(
    into: int,
    nodes: list[int],
    tensors: list[Any],
    views: list[Any],
    views_at: int,
    sizes: list[int],
    type: int,
    alignment: int = 1,
) -> bool: ...
def sum_tree(
    into: int, inputs: list[int], merges: list[int], type: int, count: int, divisor: float
) -> None: ...
def stream_bytes(into: int, source: int, bytes: int) -> None: ...

class Sizes:
    small: int
    window: int
    windows: int
    channel: int
    piece: int
    streamed: int
    slab: int
    def __init__(self) -> None: ...

class Process:
    def __init__(self, pidfd: int) -> None: ...

class Region:
    @staticmethod
    def create(where: str, ranks: int, sizes: Sizes) -> Region: ...
    @staticmethod
    def open(path: str, token: int, ranks: int, sizes: Sizes) -> Region: ...
    def unlink(self) -> None: ...
    def present(self, rank: int) -> bool: ...
    def slab(self, rank: int) -> tuple[int, int]: ...
    def reserve(self, address: int, length: int) -> None: ...
    def release(self, address: int, length: int) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def token(self) -> int: ...

class Engine:
    def __init__(self, region: Region, rank: int, cores: int) -> None: ...
    def set_cores(self, cores: int) -> None: ...
    @property
    def cores(self) -> int: ...
    def watch(self, rank: int, process: Process) -> None: ...
    def mark_present(self) -> None: ...
    def start_driver(self) -> None: ...
    def stop_driver(self) -> None: ...
    @property
    def has_driver(self) -> bool: ...
    def issue(
        self,
        kind: int,
        type: int,
        op: int,
        root: int,
        input: int,
        bytes: int,
        amount: int,
        shape: tuple[int, ...],
        outputs: list[int],
        output_bytes: int,
        send_at: list[int],
        receive_at: list[int],
        started: list[Any],
        work: object,
    ) -> int: ...
    def issue_in_place(
        self,
        kind: int,
        type: int,
        op: int,
        root: int,
        tensor: int,
        bytes: int,
        shape: tuple[int, ...],
        started: list[Any],
        work: object,
    ) -> int: ...
    def issue_ordered(
        self,
        type: int,
        first_slot: int,
        slot_bytes: int,
        slots: int,
        output_bytes: int,
        tree_inputs: list[int],
        merges: list[int],
        divisor: float,
        shape: tuple[int, ...],
        started: list[Any],
        work: object,
    ) -> int: ...
    def test(self, ticket: int) -> tuple[int, int, int]: ...
    def wait(self, ticket: int, seconds: float) -> tuple[int, int, int]: ...
    def send(
        self, to: int, tag: int, data: int, bytes: int, started: list[Any], work: object
    ) -> int: ...
    def receive(
        self, source: int, tag: int, data: int, bytes: int, started: list[Any], work: object
    ) -> int: ...
    def test_transfer(self, ticket: int) -> tuple[int, int, int]: ...
    def wait_transfer(self, ticket: int, seconds: float) -> tuple[int, int, int]: ...
    def detach_transfer(self, ticket: int) -> None: ...
    def cancel_transfer(self, ticket: int) -> bool: ...
    @property
    def transfers_kept(self) -> int: ...
    def dead_ranks(self) -> list[int]: ...
    def members(self) -> list[int]: ...
    def leave(self) -> bool: ...
    def rejoin(self, calls: int, seconds: float) -> tuple[int, int]: ...
    def missing_in_rejoin(self) -> list[int]: ...
    def exclude(self, rank: int) -> None: ...
    def abort(self) -> None: ...
    @property
    def is_quiescent(self) -> bool: ...
    @property
    def region(self) -> Region: ...

class FastPathWork:
    def as_work(self) -> Work: ...

class FastPath:
    timeout: float
    def __init__(
        self,
        *,
        engine: Engine,
        owner: object,
        issue_lock: Lock,
        recorder: FlightRecorder,
        calls: deque[Call],
        in_flight: dict[Call, Any],
        make_work: Any,
        timeout: float,
    ) -> None: ...
    # They return a `FastPathWork`, which has the interface of a `Work`.
    def sum(self, tensor: object) -> Work | None: ...
    def mean(self, tensor: object) -> Work | None: ...
    def barrier(self) -> Work | None: ...
    def close(self) -> None: ...

def configure_fast_path(
    *,
    call: type[Call],
    recorder: type[FlightRecorder],
    files: dict[str, bool],
    user_frame: Any,
    fault_points: dict[str, Any],
    profiler_flags: dict[str, Any],
    profiler_flag: str,
    work: type[Work],
    tensors: tuple[type[Tensor], ...],
    strided: object,
    dtypes: tuple[object, ...],
    exchange: object,
    max_in_flight: int,
) -> bool: ...
