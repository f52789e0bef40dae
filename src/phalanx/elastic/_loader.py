"""Data loading by micro-batch number.

`SampleOrder` says which samples a micro-batch has and how its generators are seeded; both are pure
functions of (seed, loader, loop, micro-batch). `ElasticLoader` fetches a rank's block of them in
advance through one long-lived iterator of torch's DataLoader, and anything else in the main
process. A request carries its seed to whatever process serves it, so that the number of workers,
the block and the place where a run was resumed do not change a batch.

`SampleOrder` must not refer to the loader: the iterator refers to it, and workers exit when the
last reference to the loader is gone, without waiting for the garbage collector.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from .._formatting import format_tensor
from ..errors import InvalidArgument, InvalidState, InvalidType
from ._randomness import derive_seed, preserved_generators, seed_generators

SeedPath = tuple[int | str, ...]
"""A place in the run, as `derive_seed` takes it."""

NOT_INDICES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)

LEAVE_TIMEOUT = 30
"""Seconds that a data loader's worker lives after SIGTERM, for the rank to end its step."""

SETTING_NAMES = {
    "length": "samples per epoch",
    "batch_size": "batch size",
    "micro_batches": "micro-batches per step",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
    "order": "custom order",
}


class BatchRequest(NamedTuple):
    """One batch to fetch."""

    path: SeedPath
    """What the batch is; comes back with it."""
    seed: int
    """For the generators, before the first sample is read."""
    indices: list[int]


class SampleOrder:
    """The samples of every micro-batch and evaluation batch.

    Epochs are concatenated and cut into micro-batches, so one may span several epochs. With
    `drop_last` each epoch is first cut to whole micro-batches.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int,
        micro_batches: int,
        key: int,
        shuffle: bool,
        drop_last: bool,
        order: Callable[[int], Iterable[int]] | None,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self._seed, self._key = seed, key
        self._shuffle, self._order = shuffle, order
        self._recent: dict[int, torch.Tensor] = {}
        if order is not None:
            self._recent[0] = self._given_order(order, 0)
        self.length = samples if order is None else len(self._recent[0])
        if self.length == 0:
            raise InvalidArgument("order(0) is empty")
        if drop_last and self.length < batch_size:
            raise InvalidArgument(
                f"drop_last=True leaves no micro-batch: an epoch has {self.length} samples, "
                f"batch_size is {batch_size}"
            )
        self._used = self.length - self.length % batch_size if drop_last else self.length

    def indices(self, loop: int, micro: int) -> list[int]:
        """Return the samples of a micro-batch in a loop over the loader; both count from 0."""
        epoch, start = divmod(self._first_sample(loop, micro), self._used)
        indices: list[int] = []
        while len(indices) < self.batch_size:
            stop = min(start + self.batch_size - len(indices), self._used)
            indices += self._epoch(epoch)[start:stop].tolist()
            epoch, start = epoch + 1, 0
        return indices

    def epoch_of(self, loop: int) -> int:
        """Return the epoch in which a loop begins."""
        return self._first_sample(loop, 0) // self._used

    @property
    def loops_per_epoch(self) -> int:
        """How many loops an epoch takes, rounded up."""
        return -(-self._used // (self.micro_batches * self.batch_size))

    def training_request(self, loop: int, micro: int) -> BatchRequest:
        """Return the request for a micro-batch."""
        path = ("data", self._key, loop, micro)
        return BatchRequest(path, derive_seed(self._seed, *path), self.indices(loop, micro))

    def training_requests(
        self, loop: int, micro: int, block: tuple[int, int]
    ) -> Iterator[BatchRequest]:
        """Yield the requests of a block of micro-batches from one on, without end."""
        lo, hi = block
        while True:
            try:
                request = self.training_request(loop, micro)
            except Exception:  # noqa: BLE001 - this is ahead; `fetch` raises it when it gets there
                return
            yield request
            micro += 1
            if micro == hi:
                loop, micro = loop + 1, lo

    def evaluation_request(self, number: int) -> BatchRequest:
        """Return the request for an evaluation batch, in the order of the dataset."""
        path = ("evaluate", self._key, number)
        start = number * self.batch_size
        indices = range(start, min(start + self.batch_size, self.samples))
        return BatchRequest(path, derive_seed(self._seed, *path), list(indices))

    def computation_seed(self, request: BatchRequest) -> int:
        """Return the seed for what is computed with a batch, after it was fetched."""
        return derive_seed(self._seed, "compute", *request.path)

    def _first_sample(self, loop: int, micro: int) -> int:
        return (loop * self.micro_batches + micro) * self.batch_size

    def _epoch(self, epoch: int) -> torch.Tensor:
        """Return the order of an epoch; keep the two that were used last."""
        found = self._recent.pop(epoch, None)
        if found is None:
            if self._order is not None:
                found = self._given_order(self._order, epoch)
                if len(found) != self.length:
                    raise InvalidState(
                        f"order({epoch}) has {len(found)} indices, order(0) had {self.length}. "
                        "Return the same number for every epoch"
                    )
            elif self._shuffle:
                generator = torch.Generator()
                generator.manual_seed(derive_seed(self._seed, "shuffle", self._key, epoch))
                found = torch.randperm(self.samples, generator=generator, device="cpu")
            else:
                found = torch.arange(self.samples, device="cpu")
        self._recent[epoch] = found
        if len(self._recent) > 2:
            del self._recent[next(iter(self._recent))]
        return found

    def _given_order(self, order: Callable[[int], Iterable[int]], epoch: int) -> torch.Tensor:
        # The user's function may draw: from generators that belong to the epoch.
        with preserved_generators(), one_thread():
            seed_generators(derive_seed(self._seed, "order", self._key, epoch))
            given: Any = order(epoch)
            if not hasattr(given, "__array__"):
                given = list(given)  # a sampler of torch draws when it is iterated over
        found = torch.as_tensor(given, device="cpu")
        if found.dim() != 1 or (len(found) > 0 and found.dtype in NOT_INDICES):
            kind = format_tensor(found.dtype, found.shape)
            raise InvalidType(f"order({epoch}) must return a list of integers, got {kind}")
        return found.to(torch.int64, copy=True)  # the function may shuffle one array in place


class SeededDataset(Dataset[Any]):
    """A dataset that takes a `BatchRequest` and seeds the generators before it reads samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: BatchRequest) -> tuple[SeedPath, Any]:
        seed_generators(request.seed)
        # As torch's fetcher treats it: whatever it returns goes to the collate function.
        read_all = getattr(self.dataset, "__getitems__", None)
        if read_all:
            return request.path, read_all(request.indices)
        return request.path, [self.dataset[index] for index in request.indices]


class TaggedCollate:
    """Collate the samples of a request, and return its path with the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: tuple[SeedPath, Any]) -> tuple[SeedPath, Any]:
        path, values = samples
        return path, self.collate_fn(values)


class WorkerInit:
    """Show the user's dataset in `get_worker_info()`, then call the user's `worker_init_fn`.

    Also outlive SIGTERM for a while. Schedulers send it to all processes of a job, and a rank that
    is told to leave needs its workers until the end of its step.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, SeededDataset)
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        _outlive_sigterm()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def _outlive_sigterm() -> None:
    """Have SIGTERM end this process only after `LEAVE_TIMEOUT`.

    A second one ends it at once, and the first one if its rank is gone.
    """
    rank = os.getppid()

    def handle(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getppid() != rank:
            signal.raise_signal(number)
        signal.alarm(LEAVE_TIMEOUT)

    signal.signal(signal.SIGTERM, handle)


class ElasticLoader:
    """Load micro-batches by number: the same ones at any world size.

    Made by `ElasticRun.loader`, and iterated over by ``step.micro_batches(loader)``.

    Arguments:
        dataset: A dataset with ``__len__`` and ``__getitem__`` or ``__getitems__``.
        batch_size: The number of samples of one micro-batch.
        seed: The seed of the run.
        micro_batches: The number of micro-batches of one loop over the loader, on all ranks.
        key: The number of the loader in its run. Loaders with different numbers draw differently.
        shuffle: Whether to permute the samples of every epoch.
        drop_last: Cut every epoch to whole micro-batches. By default a micro-batch may span two
            epochs, and no sample is dropped.
        order: Returns the indices of an epoch, in place of `shuffle`; for weighted sampling. It
            may draw from the global generators, which are seeded from the epoch, and may return
            a sampler of torch. All epochs must have the same length. It may be called more than
            once for an epoch, and ahead of time.
        num_workers, collate_fn, pin_memory, prefetch_factor, worker_init_fn,
        multiprocessing_context, timeout: As for torch's DataLoader.

    Raises:
        InvalidType: The dataset has no random access.
        InvalidArgument: The dataset is empty, or has less than one batch with `drop_last`.
        ValueError: As raised by torch's DataLoader for its arguments.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        micro_batches: int,
        key: int,
        shuffle: bool = True,
        drop_last: bool = False,
        order: Callable[[int], Iterable[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> None:
        samples = _checked_length(dataset)
        if order is not None and not callable(order):
            raise InvalidType(
                f"order must be a function of the epoch, got {type(order).__name__}. For a sampler "
                "of torch, pass order=lambda epoch: sampler"
            )
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise InvalidArgument(f"batch_size must be an integer of at least 1, got {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.key = key
        """The number of the loader in its run."""
        self.next_loop = 0
        """The number of loops over the loader so far."""
        self.shapes = ""
        """The shapes of its first batch, once it was fetched."""
        # The DataLoader draws a seed for its workers; not from the default generator.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(seed, "workers", key))
        self._main_process_options: dict[str, Any] = {
            "dataset": SeededDataset(dataset),
            "collate_fn": TaggedCollate(default_collate if collate_fn is None else collate_fn),
            "pin_memory": pin_memory,
            "generator": generator,
        }
        self._worker_options = self._main_process_options | {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": WorkerInit(worker_init_fn),
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
        }
        DataLoader(batch_sampler=(), **self._worker_options)  # checks its arguments
        # Two that it checks only when its first iterator is made, by assertions.
        if num_workers == 0 and timeout:
            raise InvalidArgument(f"timeout={timeout} needs num_workers > 0")
        if prefetch_factor == 0:
            raise InvalidArgument("prefetch_factor must be at least 1, got 0")
        self._order = SampleOrder(
            samples,
            batch_size,
            seed=seed,
            micro_batches=micro_batches,
            key=key,
            shuffle=shuffle,
            drop_last=drop_last,
            order=order,
        )
        self._settings: dict[str, int | bool] = {
            "length": self._order.length,
            "batch_size": batch_size,
            "micro_batches": micro_batches,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "order": order is not None,
        }
        self._has_worker_init = worker_init_fn is not None
        self._block = (0, micro_batches)
        self._pending: deque[BatchRequest] = deque()
        self._stream: Any = None
        """The iterator with workers, if it is running."""
        self._close_at_exit = _closing(weakref.ref(self))
        self._position = (0, 0)
        """The loop and micro-batch that it returns next."""

    def __iter__(self) -> NoReturn:
        raise InvalidState(
            "a loader of ElasticRun cannot be iterated directly: use "
            "`for micro in step.micro_batches(loader)`, or run.evaluate(function, loader)"
        )

    def indices(self, loop: int, micro: int) -> list[int]:
        """Return the samples of a micro-batch in a loop over the loader; both count from 0."""
        return self._order.indices(loop, micro)

    @property
    def epoch(self) -> int:
        """The epoch in which the next loop begins, from 0."""
        return self._order.epoch_of(self.next_loop)

    def __len__(self) -> int:
        """Return how many loops an epoch takes; the last of them may end in the next epoch."""
        return self._order.loops_per_epoch

    def __repr__(self) -> str:
        return (
            f"<ElasticLoader {self.key}: {self._order.length} samples, micro-batches of "
            f"{self.batch_size} ({self.shapes or 'none yet'}), loop {self.next_loop}>"
        )

    # -- training ----------------------------------------------------------------------------

    def _set_block(self, lo: int, hi: int) -> None:
        """Set the micro-batches of this rank, ``range(lo, hi)``, to fetch in advance."""
        assert 0 <= lo < hi <= self._order.micro_batches
        if self._block != (lo, hi):
            self.close()
            self._block = (lo, hi)

    def _fetch(self, loop: int, micro: int) -> Any:
        """Return the batch of a micro-batch.

        Fast if micro-batches of the block are requested in order, for workers have fetched them
        in advance. Any other request is served too: within the block by starting the workers
        again from there, otherwise in the main process, or if there is a `worker_init_fn`, without
        which the dataset may not work, by a worker for this request.

        A fetch in the main process clobbers the global generators; callers must seed them.
        """
        assert loop >= 0
        assert 0 <= micro < self._order.micro_batches
        lo, hi = self._block
        request = self._order.training_request(loop, micro)
        if self.num_workers > 0 and not lo <= micro < hi and self._has_worker_init:
            return self._fetch_in_new_worker(request)
        if self.num_workers == 0 or not lo <= micro < hi:
            return self._fetch_in_main_process(request)
        if self._stream is None or self._position != (loop, micro):
            self.close()
            requests = self._order.training_requests(loop, micro, self._block)
            self._stream = self._start(requests)
            atexit.register(self._close_at_exit)  # later than torch: so this is called earlier
        try:
            batch = _take(self._stream, request.path)
        except BaseException:
            self.close()  # after the death of a worker the iterator would wait for it
            raise
        self._position = (loop, micro + 1) if micro + 1 < hi else (loop + 1, lo)
        return batch

    def close(self) -> None:
        """Stop the workers, if any are running. The next fetch starts them again."""
        stream, self._stream = self._stream, None
        atexit.unregister(self._close_at_exit)
        if stream is not None:
            _stop(stream)

    # -- evaluation --------------------------------------------------------------------------

    def _evaluation_batches(self) -> int:
        """Return the number of batches of an evaluation over the dataset."""
        return -(-self._order.samples // self.batch_size)

    def _evaluation_iterator(self, lo: int, hi: int) -> Iterator[tuple[int, int, Any]]:
        """Yield number, number of samples and batch of the evaluation batches ``range(lo, hi)``.

        The generators are set for what the caller computes with a batch. Starts workers of its own,
        and stops them when it ends or is closed.
        """
        assert 0 <= lo <= hi <= self._evaluation_batches()
        order = self._order
        stream: Any = None
        if self.num_workers > 0 and lo < hi:
            stream = self._start(order.evaluation_request(number) for number in range(lo, hi))
        try:
            for number in range(lo, hi):
                request = order.evaluation_request(number)
                here = stream is None
                batch = (
                    self._fetch_in_main_process(request) if here else _take(stream, request.path)
                )
                seed_generators(order.computation_seed(request))
                yield number, len(request.indices), batch
        finally:
            if stream is not None:
                _stop(stream)

    # -- state -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Count a loop over the loader."""
        self.next_loop += 1

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position, and the settings that give it a meaning."""
        return {"loop": self.next_loop, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Check `_differences` first."""
        self.next_loop = int(state["loop"])

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        """Return the settings that differ from a state's: ``batch size: 32 saved, 16 now``."""
        now = self._settings
        return [
            f"{name}: {_format_setting(state[key])} saved, {_format_setting(now[key])} now"
            for key, name in SETTING_NAMES.items()
            if key in state and state[key] != self._settings[key]
        ]

    # -- fetching ----------------------------------------------------------------------------

    def _start(self, requests: Iterable[Any], **options: Any) -> Any:
        options = {**self._worker_options, **options}
        stream: Any = _iterator(DataLoader(batch_sampler=requests, **options))
        # If the loader is in a reference cycle, the garbage collector finalizes these queues before
        # the iterator, which then cannot tell its workers to exit and waits 5 s for each of them.
        # A reference from outside of the cycle reverses the order.
        queues = (*stream._index_queues, stream._worker_result_queue)
        weakref.finalize(stream, _release, queues).atexit = False
        return stream

    @cached_property
    def _main_process_iterator(self) -> Iterator[Any]:
        """An iterator of torch's that fetches what is in `_pending`, in the main process."""
        requests: Iterable[Any] = iter(self._pending.popleft, None)
        return _iterator(DataLoader(batch_sampler=requests, **self._main_process_options))

    def _fetch_in_new_worker(self, request: BatchRequest) -> Any:
        stream = self._start([request], num_workers=1)
        try:
            return _take(stream, request.path)
        finally:
            _stop(stream)

    def _fetch_in_main_process(self, request: BatchRequest) -> Any:
        self._pending.clear()  # if a signal interrupted the last fetch
        self._pending.append(request)
        with one_thread():
            return _take(self._main_process_iterator, request.path)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one intra-op thread, as in a worker of a DataLoader."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _iterator(loader: DataLoader[Any]) -> Iterator[Any]:
    # It draws from the loader's generator, on the CPU, into a tensor on the default device.
    if torch.get_default_device().type == "cpu":
        return iter(loader)
    with torch.device("cpu"):
        return iter(loader)


def _release(queues: tuple[Any, ...]) -> None:
    """Drop the reference to `queues`."""


def _closing(weak: weakref.ref[ElasticLoader]) -> Callable[[], None]:
    """Return a function that stops the workers of a loader, if it is still there.

    At the end of the interpreter torch would first wait 5 s for workers that have not been told to
    end.
    """

    def close() -> None:
        loader = weak()
        if loader is not None:
            loader.close()

    return close


def _stop(stream: Any) -> None:
    # torch ends a worker that does not exit by SIGTERM, which has to wait for a call of C code.
    for worker in stream._workers:
        worker.terminate = worker.kill
    # torch's SIGCHLD handler raises wherever the main thread is when a worker has died. It is to
    # end in any case, and torch ends the others in a finally clause.
    with suppress(RuntimeError):
        stream._shutdown_workers()


def _take(stream: Iterator[Any], path: SeedPath) -> Any:
    try:
        found, batch = next(stream)
    except StopIteration as error:
        # The requests have no end. Raised as it is, it would end a loop of the caller's silently.
        raise InvalidState(f"the dataset or collate_fn raised StopIteration: {error}") from error
    assert found == path, f"asked for {path}, got {found}"
    return batch


def _format_setting(value: int | bool) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _checked_length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise InvalidType("run.loader() takes the dataset, not a DataLoader: pass loader.dataset")
    if isinstance(dataset, IterableDataset):
        raise InvalidType(
            f"ElasticRun needs random access to samples, but {kind} is an IterableDataset. Give "
            "it __len__ and __getitem__ as a torch.utils.data.Dataset, or read it into a list"
        )
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise InvalidType(
            f"ElasticRun needs random access to samples, but {kind} has no __getitem__. Give it "
            "__len__ and __getitem__, or read it into a list"
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise InvalidType(
            f"ElasticRun needs the number of samples, but {kind} has no __len__. Give it __len__ "
            "and __getitem__, or read it into a list"
        ) from error
    if length == 0:
        raise InvalidArgument(f"the dataset is empty: {kind} has length 0")
    return length
