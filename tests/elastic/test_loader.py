"""Randomness and data of micro-batches: the same for any block, worker count and restart."""

import gc
import os
import random
import signal
from multiprocessing.util import Finalize

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from phalanx import errors
from phalanx.elastic._loader import ElasticLoader
from phalanx.elastic._randomness import derive_seed, preserved_generators, seed_generators

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
"""torch's advice to use at most as many workers as there are cores."""

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class Augmented(Dataset):
    """Samples with draws from every generator, and the process that made them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert index < self.length
        return {"index": index, **draws(), "process": os.getpid()}


class Failing(Dataset):
    """Raises for one sample, until it is repaired."""

    def __init__(self, length, bad, fail):
        self.length, self.bad, self.fail = length, bad, fail

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            self.fail()
        return index


def draws():
    return {"torch": torch.rand(2).tolist(), "python": random.random(), "numpy": np.random.rand()}


def generator_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def make(dataset, batch_size=2, *, seed=7, micro_batches=4, key=0, **options):
    return ElasticLoader(
        dataset, batch_size, seed=seed, micro_batches=micro_batches, key=key, **options
    )


@pytest.fixture
def loader_of():
    """Make loaders that are closed after the test."""
    made = []

    def create(*arguments, **options):
        made.append(make(*arguments, **options))
        return made[-1]

    yield create
    for each in made:
        each.close()


def with_draws(batch):
    """Return the samples of a batch without the process that fetched them."""
    return [{key: sample[key] for key in sample if key != "process"} for sample in batch]


def processes(batch):
    return {sample["process"] for sample in batch}


def expected(dataset, loop, micro, **options):
    """Return a batch as fetched first of all by a new loader without workers."""
    return with_draws(make(dataset, collate_fn=list, **options)._fetch(loop, micro))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- seeds ---------------------------------------------------------------------------------

PATHS = st.lists(st.integers(-(2**70), 2**70) | st.text("a1,'\\", max_size=4), max_size=4)


def test_derived_seeds_do_not_change_between_versions():
    """A run that is resumed after an update needs the same ones."""
    assert derive_seed(0) == 0x9C09BF85306200AC
    assert derive_seed(7, "data", 0, 12, 3) == 0x57962B012B51B379
    assert derive_seed(7, "Grüße\ud800") == 0xE2A8FA26D6F78E1E


@settings(deadline=None)
@given(PATHS, PATHS)
def test_different_paths_have_different_seeds(one, other):
    assert (derive_seed(0, *one) == derive_seed(0, *other)) == (one == other)


def test_parts_of_a_path_are_kept_apart():
    paths = [(1, 23), (12, 3), (123,), ("1", 23), ("1, 23",), (1, "23"), ("", 1, 23), (1, 23, "")]
    assert len({derive_seed(0, *path) for path in paths}) == len(paths)


def test_equal_integers_of_other_types_have_the_same_seed():
    assert derive_seed(np.int64(3), np.int32(1), True) == derive_seed(3, 1, 1)


def test_all_generators_draw_the_same_after_seeding():
    def normals():
        # An odd number: each generator makes two at a time and keeps the second.
        return torch.randn(1).item(), random.gauss(0, 1), np.random.randn()

    seed_generators(2**64 - 1)
    first = normals()
    seed_generators(2**64 - 1)
    assert normals() == first
    seed_generators(2**64 - 2**32 - 1)  # torch uses the lower half, NumPy the upper one
    assert [one == other for one, other in zip(normals(), first, strict=True)] == [
        True,
        False,
        False,
    ]
    seed_generators(2**64 - 2)
    assert [one == other for one, other in zip(normals(), first, strict=True)] == [
        False,
        False,
        True,
    ]


def test_preserved_generators_leave_no_trace_after_an_error():
    seed_generators(1)
    before = generator_states()
    with pytest.raises(KeyError), preserved_generators():
        seed_generators(2)
        draws()
        raise KeyError
    assert generator_states() == before


# -- which samples -------------------------------------------------------------------------

SHAPES = st.fixed_dictionaries(
    {
        "length": st.integers(1, 23),
        "batch_size": st.integers(1, 9),
        "micro_batches": st.integers(1, 5),
        "seed": st.integers(0, 3),
    }
)


def all_indices(loader, loops, micro_batches):
    return [
        index
        for loop in range(loops)
        for micro in range(micro_batches)
        for index in loader.indices(loop, micro)
    ]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 6), st.booleans())
def test_batches_are_the_concatenated_epochs_cut(shape, loops, shuffle):
    """No sample is skipped or repeated, whatever the length."""
    length, seed = shape["length"], shape["seed"]
    micro_batches = shape["micro_batches"]
    loader = make(
        range(length), shape["batch_size"], micro_batches=micro_batches, seed=seed, shuffle=shuffle
    )
    found = all_indices(loader, loops, micro_batches)
    assert len(found) == loops * micro_batches * shape["batch_size"]
    for start in range(0, len(found), length):
        epoch = found[start : start + length]
        if not shuffle:
            assert epoch == [*range(length)][: len(epoch)]
        assert len({*epoch}) == len(epoch)
        assert {*epoch} <= {*range(length)}


@settings(deadline=None)
@given(SHAPES, st.integers(1, 6))
def test_drop_last_cuts_every_epoch_to_whole_batches(shape, loops):
    length, batch_size = shape["length"], shape["batch_size"]
    micro_batches = shape["micro_batches"]
    options = {"seed": shape["seed"], "micro_batches": micro_batches}
    if length < batch_size:
        with pytest.raises(errors.InvalidArgument, match=f"{length} samples"):
            make(range(length), batch_size, drop_last=True, **options)
        return
    loader = make(range(length), batch_size, drop_last=True, **options)
    found = all_indices(loader, loops, micro_batches)
    used = length // batch_size * batch_size
    # A loader with one batch per epoch shows the whole permutation.
    whole = make(range(length), length, seed=shape["seed"], micro_batches=1)
    for start in range(0, len(found), used):
        epoch = found[start : start + used]
        assert epoch == whole.indices(start // used, 0)[: len(epoch)]


@settings(deadline=None)
@given(SHAPES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
def test_indices_do_not_depend_on_what_was_asked_before(shape, requests):
    def new():
        options = {key: shape[key] for key in ("batch_size", "micro_batches", "seed")}
        return make(range(shape["length"]), **options)

    loader = new()
    for loop, number in requests:
        micro = number % shape["micro_batches"]
        assert loader.indices(loop, micro) == new().indices(loop, micro)


def test_permutations_depend_on_seed_loader_and_epoch():
    def permutation(loop=0, **options):
        return tuple(make(range(30), 30, micro_batches=1, **options).indices(loop, 0))

    found = {permutation(), permutation(1), permutation(2), permutation(seed=8), permutation(key=1)}
    assert len(found) == 5


@settings(deadline=None)
@given(SHAPES, st.integers(0, 40))
def test_the_epoch_of_a_loop_is_that_of_its_first_sample(shape, loop):
    options = {key: shape[key] for key in ("batch_size", "micro_batches", "seed")}
    loader = make(range(shape["length"]), **options)
    before = loop * shape["micro_batches"] * shape["batch_size"]
    loader.load_state_dict({"loop": loop})
    assert loader.epoch == before // shape["length"]
    assert loader.indices(loop, 0)[0] in range(shape["length"])
    samples = shape["micro_batches"] * shape["batch_size"]
    assert (len(loader) - 1) * samples < shape["length"] <= len(loader) * samples


@settings(deadline=None)
@given(SHAPES, st.integers(1, 30), st.integers(1, 4))
def test_a_given_order_is_concatenated_and_cut(shape, epoch_length, loops):
    def order(epoch):
        return [(epoch + place) % shape["length"] for place in range(epoch_length)]

    micro_batches = shape["micro_batches"]
    loader = make(
        range(shape["length"]), shape["batch_size"], micro_batches=micro_batches, order=order
    )
    found = all_indices(loader, loops, micro_batches)
    epochs = -(-len(found) // epoch_length)
    assert found == [index for epoch in range(epochs) for index in order(epoch)][: len(found)]


def test_an_order_may_draw_from_the_global_generators():
    def order(epoch):
        return WeightedRandomSampler([0.1, 0.2, 0.3, 0.4] * 5, 20)

    before = generator_states()
    loader = make(range(20), 10, micro_batches=2, order=order)
    first, second = (all_indices(loader, 2, 2)[part] for part in (slice(20), slice(20, 40)))
    assert generator_states() == before
    assert first != second
    torch.rand(1)
    again = make(range(20), 10, micro_batches=2, order=order)
    assert [*again.indices(1, 0), *again.indices(1, 1)] == second


def test_an_order_may_reuse_its_array():
    array = np.arange(4)

    def order(epoch):
        array[:] = (array + 1) % 4
        return array

    loader = make(range(4), 6, micro_batches=1, order=order)
    assert loader.indices(0, 0) == [1, 2, 3, 0, 2, 3]
    assert loader.indices(0, 0) == [1, 2, 3, 0, 2, 3]


def test_the_orders_of_two_epochs_are_kept():
    asked = []

    def order(epoch):
        asked.append(epoch)
        return range(4)

    loader = make(range(4), 3, micro_batches=1, order=order)
    for loop in (0, 1, 2, 1, 0, 2):
        loader.indices(loop, 0)
    assert asked == [0, 1, 2, 0, 1, 2]


@WORKERS
def test_an_order_of_another_length_names_both(loader_of, num_workers):
    """When its epoch begins, on all ranks, and not when a worker is to fetch it in advance."""
    loader = loader_of(
        range(9), micro_batches=2, num_workers=num_workers, order=lambda epoch: range(4 + epoch)
    )
    assert [loader._fetch(0, micro).tolist() for micro in (0, 1)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(errors.InvalidState, match=r"order\(1\) has 5 indices, .* had 4"):
            loader._fetch(1, 0)
    assert loader._fetch(0, 1).tolist() == [2, 3]


# -- fetching ------------------------------------------------------------------------------


@WORKERS
def test_batches_do_not_depend_on_workers_blocks_and_restarts(loader_of, num_workers):
    """Every batch is that of a new loader that is asked for nothing else."""
    dataset = Augmented(13)
    loader = loader_of(dataset, num_workers=num_workers, collate_fn=list)
    requests = []
    for block, first, loops in [((0, 2), 0, 2), ((0, 3), 2, 2), ((1, 3), 4, 2), ((1, 3), 1, 1)]:
        requests += [
            (block, loop, micro) for loop in range(first, first + loops) for micro in range(*block)
        ]
    requests.insert(5, ((0, 3), 2, 3))  # a micro-batch of another rank
    for block, loop, micro in requests:
        loader._set_block(*block)
        torch.rand(1), random.random(), np.random.rand()
        found = with_draws(loader._fetch(loop, micro))
        assert found == expected(dataset, loop, micro)
        assert [sample["index"] for sample in found] == loader.indices(loop, micro)


def test_one_set_of_workers_serves_a_block_in_order(loader_of):
    loader = loader_of(Augmented(13), num_workers=2, collate_fn=list)
    loader._set_block(1, 4)
    found = [processes(loader._fetch(loop, micro)) for loop in range(3) for micro in range(1, 4)]
    assert len(set.union(*found)) == 2
    assert os.getpid() not in set.union(*found)
    # Outside of the block, the main process; the workers keep their place.
    assert processes(loader._fetch(2, 0)) == {os.getpid()}
    assert processes(loader._fetch(3, 1)) < set.union(*found)
    # A step back needs new ones.
    assert not processes(loader._fetch(3, 1)) & set.union(*found)


def test_workers_outlive_a_signal_to_all_processes(loader_of):
    """A rank that is told to leave, as they are, needs them until the end of its step."""
    loader = loader_of(Augmented(13), num_workers=1, collate_fn=list)
    loader._set_block(0, 4)
    (worker,) = processes(loader._fetch(0, 0))
    os.kill(worker, signal.SIGTERM)
    for loop in range(20):  # more than it has fetched in advance
        for micro in range(4):
            if (loop, micro) > (0, 0):
                assert processes(loader._fetch(loop, micro)) == {worker}
    loader.close()
    assert not is_running(worker)


def test_a_dataset_that_needs_worker_init_fn_is_read_in_a_worker(loader_of):
    """Also for a micro-batch outside of the block, as of a lost rank."""
    loader = loader_of(Augmented(13), num_workers=1, collate_fn=list, worker_init_fn=int)
    loader._set_block(1, 4)
    assert os.getpid() not in processes(loader._fetch(0, 0))
    assert with_draws(loader._fetch(0, 0)) == expected(Augmented(13), 0, 0)


def test_different_batches_draw_differently():
    loader = make(Augmented(4), micro_batches=2, collate_fn=list)
    other = make(Augmented(4), micro_batches=2, collate_fn=list, key=1)
    batches = [loader._fetch(0, 0), loader._fetch(0, 1), loader._fetch(1, 0), other._fetch(0, 0)]
    for each in (loader, other):
        batches += [batch for _, _, batch in each._evaluation_iterator(0, 2)]
    for name in ("torch", "python", "numpy"):
        assert len({str(sample[name]) for batch in batches for sample in batch}) == 16


def test_workers_leave_the_generators_alone(loader_of):
    before = generator_states()
    loader = loader_of(Augmented(5), num_workers=1)
    loader._fetch(0, 0)
    assert generator_states() == before


def test_the_collate_function_draws_from_the_same_generators(loader_of):
    def collate(samples):
        return [sample["index"] for sample in samples], draws()

    found = [
        loader_of(Augmented(5), num_workers=workers, collate_fn=collate)._fetch(0, 1)
        for workers in (0, 1)
    ]
    assert found[0] == found[1]
    assert found[0][0] == make(Augmented(5)).indices(0, 1)


@WORKERS
def test_samples_are_collated_as_by_torch(loader_of, num_workers):
    dataset = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = loader_of(dataset, 4, num_workers=num_workers)
    values, labels = loader._fetch(1, 2)
    assert labels.tolist() == values.tolist() == loader.indices(1, 2)


@WORKERS
def test_getitems_of_the_dataset_gets_the_whole_list(loader_of, num_workers):
    class Batched(Augmented):
        def __getitem__(self, index):
            raise AssertionError

        def __getitems__(self, indices):
            assert type(indices) is list
            return {"given": indices, **draws()}

    loader = loader_of(Batched(9), 3, num_workers=num_workers, collate_fn=lambda values: [values])
    (found,) = loader._fetch(2, 1)
    assert found.pop("given") == loader.indices(2, 1)
    seed_generators(derive_seed(7, "data", 0, 2, 1))
    assert found == draws()


def test_the_main_process_fetches_with_one_thread(loader_of):
    class Threads(Augmented):
        def __getitem__(self, index):
            if index == self.length - 1:
                raise IndexError
            return torch.get_num_threads()

    loader = loader_of(Threads(3), 2, shuffle=False, collate_fn=list)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert loader._fetch(0, 0) == [1, 1]
        assert torch.get_num_threads() == 3
        with pytest.raises(IndexError):
            loader._fetch(0, 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_workers_see_the_dataset_of_the_user(loader_of):
    class Named(Augmented):
        worker = None

        def __getitem__(self, index):
            return self.worker, get_worker_info().id, get_worker_info().dataset is self

    def initialise(worker):
        get_worker_info().dataset.worker = worker

    loader = loader_of(Named(4), num_workers=2, collate_fn=list, worker_init_fn=initialise)
    assert loader._fetch(0, 0) == [(0, 0, True)] * 2
    assert loader._fetch(0, 1) == [(1, 1, True)] * 2


@WORKERS
def test_another_default_device_is_no_obstacle(loader_of, num_workers):
    loader = loader_of(range(4), num_workers=num_workers, collate_fn=list, shuffle=False)
    with torch.device("meta"):
        assert loader._fetch(0, 1) == [2, 3]


# -- failures ------------------------------------------------------------------------------


def raise_error():
    raise KeyError("no such sample")


@WORKERS
def test_an_error_of_the_dataset_is_raised_once(loader_of, num_workers):
    loader = loader_of(
        Failing(8, 3, raise_error), num_workers=num_workers, shuffle=False, collate_fn=list
    )
    assert loader._fetch(0, 0) == [0, 1]
    with pytest.raises(KeyError, match="no such sample") as caught:
        loader._fetch(0, 1)
    assert ("in DataLoader worker process" in str(caught.value)) == (num_workers > 0)
    assert loader._fetch(0, 2) == [4, 5]
    assert loader._fetch(0, 3) == [6, 7]
    with pytest.raises(KeyError):
        loader._fetch(1, 1)


def test_the_death_of_a_worker_is_raised_and_survived(loader_of):
    dataset = Failing(100, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    loader = loader_of(dataset, num_workers=1, shuffle=False, collate_fn=list)
    loader._set_block(1, 4)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        loader._fetch(0, 1)
    assert loader._fetch(0, 2) == [4, 5]


@WORKERS
def test_stop_iteration_does_not_end_an_evaluation_early(loader_of, num_workers):
    """Samples after it would be lost without an error."""

    def stop():
        raise StopIteration

    loader = loader_of(Failing(8, 3, stop), num_workers=num_workers, collate_fn=list)
    batches = loader._evaluation_iterator(0, 4)
    assert next(batches) == (0, 2, [0, 1])
    with pytest.raises(errors.InvalidState, match="raised StopIteration"):
        next(batches)


# -- the end of workers --------------------------------------------------------------------


def test_close_ends_the_workers_until_the_next_fetch(loader_of):
    loader = loader_of(Augmented(8), num_workers=2, collate_fn=list)
    found = processes(loader._fetch(0, 0)) | processes(loader._fetch(0, 1))
    assert all(map(is_running, found))
    loader.close()
    assert not any(map(is_running, found))
    assert with_draws(loader._fetch(0, 2)) == expected(Augmented(8), 0, 2)


def test_close_does_not_mind_how_a_worker_ends(loader_of):
    """torch's handler of SIGCHLD raises for an exit code other than 0, in the middle of close()."""

    def exit_with_3(worker):
        Finalize(None, os._exit, args=(3,), exitpriority=0)

    loader = loader_of(Augmented(8), num_workers=2, collate_fn=list, worker_init_fn=exit_with_3)
    found = processes(loader._fetch(0, 0)) | processes(loader._fetch(0, 1))
    loader.close()
    assert not any(map(is_running, found))


def test_workers_end_with_the_last_reference_to_the_loader():
    loader = make(Augmented(8), num_workers=1, collate_fn=list)
    (worker,) = processes(loader._fetch(0, 0))
    assert is_running(worker)
    gc.disable()
    try:
        del loader
        assert not is_running(worker)
    finally:
        gc.enable()


def test_workers_of_a_loader_in_a_reference_cycle_exit_by_themselves(tmp_path):
    """And are not killed after torch's join timeout, 5 s for each worker."""

    def note_exit(worker):
        Finalize(None, (tmp_path / str(worker)).touch, exitpriority=0)

    loader = make(Augmented(8), num_workers=2, collate_fn=list, worker_init_fn=note_exit)
    found = processes(loader._fetch(0, 0)) | processes(loader._fetch(0, 1))
    loader.itself = loader
    del loader
    gc.collect()
    assert not any(map(is_running, found))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_an_abandoned_evaluation_ends_its_workers(loader_of):
    loader = loader_of(Augmented(8), num_workers=1, collate_fn=list)
    batches = loader._evaluation_iterator(0, 4)
    (worker,) = processes(next(batches)[2])
    assert worker != os.getpid()
    batches.close()
    assert not is_running(worker)


def test_a_failed_evaluation_ends_its_workers(loader_of):
    """Although the traceback refers to them."""

    def collate(samples):
        return os.getpid() if samples[0] == 0 else raise_error()

    loader = loader_of(range(8), num_workers=1, collate_fn=collate)
    batches = loader._evaluation_iterator(0, 4)
    worker = next(batches)[2]
    with pytest.raises(KeyError) as caught:
        next(batches)
    assert caught.tb is not None
    assert not is_running(worker)


# -- evaluation ----------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.data())
def test_evaluation_reads_every_sample_once_in_order(length, batch_size, data):
    loader = make(range(length), batch_size, collate_fn=list)
    batches = loader._evaluation_batches()
    cut = data.draw(st.integers(0, batches))
    found = [*loader._evaluation_iterator(0, cut), *loader._evaluation_iterator(cut, batches)]
    assert [number for number, _, _ in found] == [*range(batches)]
    assert [index for _, _, batch in found for index in batch] == [*range(length)]
    assert [samples for _, samples, _ in found] == [len(batch) for _, _, batch in found]


def test_evaluation_draws_the_same_with_workers_and_in_parts(loader_of):
    dataset = Augmented(7)
    loader = loader_of(dataset, num_workers=2, collate_fn=list, order=lambda _: [3])
    alone = make(dataset, collate_fn=list, drop_last=True)
    found = [(number, with_draws(batch)) for number, _, batch in loader._evaluation_iterator(1, 4)]
    others = alone._evaluation_iterator(1, 4)
    assert found == [(number, with_draws(batch)) for number, _, batch in others]
    assert [*loader._evaluation_iterator(2, 2)] == []


# -- state ---------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5))
def test_position_is_restored(loops):
    loader = make(range(10))
    for _ in range(loops):
        loader._advance()
    state = loader.state_dict()
    assert state["loop"] == loops
    other = make(range(10))
    other.load_state_dict(state)
    assert other.next_loop == loops
    assert other._differences(state) == []


def test_differences_name_settings_with_both_values():
    state = make(range(10), 2, micro_batches=4).state_dict()
    other = make(
        range(12), 3, micro_batches=2, shuffle=False, drop_last=True, order=lambda _: range(9)
    )
    assert other._differences(state) == [
        "samples per epoch: 10 saved, 9 now",
        "batch size: 2 saved, 3 now",
        "micro-batches per step: 4 saved, 2 now",
        "shuffle: on saved, off now",
        "drop_last: off saved, on now",
        "custom order: off saved, on now",
    ]


# -- misuse --------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


REFUSED = {
    "iterable": (Stream(), {}, errors.InvalidType, "Stream is an IterableDataset. Give it __len__"),
    "unsized": (Unsized(), {}, errors.InvalidType, "Unsized has no __len__. Give it"),
    "no access": ({1, 2}, {}, errors.InvalidType, "set has no __getitem__. Give it"),
    "empty": ([], {}, errors.InvalidArgument, "the dataset is empty"),
    "batch size": ([1], {"batch_size": 0}, errors.InvalidArgument, "batch_size .* got 0"),
    "order empty": ([1], {"order": lambda _: []}, errors.InvalidArgument, r"order\(0\) is empty"),
    "order floats": ([1], {"order": lambda _: [0.5]}, errors.InvalidType, r"got float32\[1\]"),
    "order nested": ([1], {"order": lambda _: [[0]]}, errors.InvalidType, r"got int64\[1, 1\]"),
    "workers": ([1], {"num_workers": -1}, ValueError, "num_workers"),
    "prefetch": ([1], {"num_workers": 1, "prefetch_factor": 0}, ValueError, "prefetch_factor"),
    "prefetch alone": ([1], {"prefetch_factor": 2}, ValueError, "prefetch_factor"),
    "timeout": ([1], {"timeout": 1}, ValueError, "timeout=1 needs num_workers > 0"),
    "context": (
        [1],
        {"num_workers": 1, "multiprocessing_context": "thread"},
        ValueError,
        "multiprocessing_context",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_construction(case):
    dataset, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make(dataset, **options)


def test_direct_iteration_says_what_to_use():
    with pytest.raises(errors.InvalidState, match=r"step.micro_batches\(loader\)"):
        [*make([1])]
