"""A folder of checkpoints: what is kept, what is removed and what never is, and by whom."""

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import (
    Checkpointer,
    CheckpointReader,
    Folder,
    PerRank,
    RankInfo,
    make_sync_checkpointer,
)
from phalanx.checkpoint._locks import Lock
from phalanx.checkpoint._shelf import LocalShelf, name_of_step, step_of_name
from phalanx.checkpoint._storage import storage_at
from phalanx.errors import (
    CheckpointError,
    CheckpointNotFound,
    FolderInUse,
    InvalidArgument,
    InvalidType,
    MissingKeys,
    SaveFailed,
    StateMismatch,
)

from .states import saved


def state(step):
    return {"weight": torch.full((50,), float(step)), "step": step}


def filled(path, steps, **options):
    folder = Folder(path, **options)
    for step in steps:
        folder.save(step, state(step))
    return folder


def names(path):
    return sorted(name for name in os.listdir(path) if name != ".saving")


def test_the_last_ones_and_every_so_many_are_kept(tmp_path):
    with filled(tmp_path / "run", range(0, 50, 5), keep_last=2, keep_every=20) as folder:
        assert folder.steps() == [0, 20, 40, 45]
        assert folder.latest() == 45
        assert folder.load()["step"] == 45
        assert folder.load(20)["step"] == 20
    assert names(tmp_path / "run") == [name_of_step(step) for step in (0, 20, 40, 45)]


def test_nothing_there_is_no_step(tmp_path):
    folder = Folder(tmp_path / "run")
    assert folder.latest() is None
    assert folder.steps() == []
    with pytest.raises(CheckpointNotFound, match="no checkpoint in .*run"):
        folder.load()
    assert not (tmp_path / "run").exists(), "who only looks leaves nothing"


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    folder = filled(tmp_path, [1, 2])
    with pytest.raises(CheckpointNotFound, match="no step 3; there are: 1, 2"):
        folder.load(3)


def test_it_loads_into_a_state_and_strictly(tmp_path):
    folder = filled(tmp_path, [7])
    mine = {"weight": torch.zeros(50), "step": None}
    folder.load(state=mine)
    assert mine["step"] == 7
    assert mine["weight"].tolist() == [7.0] * 50
    with pytest.raises(CheckpointError, match="other"):
        folder.load(state={"other": None})
    assert folder.load(state={"other": None}, strict=False)


def test_the_number_decides_and_never_the_clock(tmp_path):
    folder = filled(tmp_path, [8, 9, 10, 11], keep_last=4)
    for age, step in enumerate(folder.steps()):
        when = 1_900_000_000 - age * 1_000_000
        os.utime(os.path.join(folder.path(step), "manifest.json"), (when, when))
        os.utime(folder.path(step), (when, when))
    assert folder.load()["step"] == 11
    folder.close()
    assert filled(tmp_path, [12], keep_last=2).steps() == [11, 12]


def test_names_are_in_the_order_of_steps_and_no_others_count(tmp_path):
    assert sorted(map(name_of_step, [100, 20, 3])) == [name_of_step(step) for step in (3, 20, 100)]
    assert step_of_name("step-123456789012") == 123456789012
    strangers = (
        "step-1",
        "step-000000001",
        "step-0000000a",
        "a-step-00000001",
        "step-0000000\u0661",
    )
    for name in strangers:
        assert step_of_name(name) is None, name


def test_a_step_before_the_newest_is_refused_until_the_folder_is_rewound(tmp_path):
    folder = filled(tmp_path, [1, 2, 3, 4])
    with pytest.raises(SaveFailed, match=r"has step 4, which is after 3.*rewind\(3\)"):
        folder.save(3, state(3))
    folder.rewind(2)
    assert folder.steps() == [2]
    folder.save(3, state(3))
    assert folder.latest() == 3


def test_the_same_step_is_replaced(tmp_path):
    folder = filled(tmp_path, [1, 2])
    folder.save(2, {"step": "again"})
    assert folder.load() == {"step": "again"}


def test_what_is_damaged_is_not_one_of_the_last_and_stays(tmp_path):
    folder = filled(tmp_path, [1, 2, 3], keep_last=5)
    for step, name in ((3, "manifest.json"), (2, None)):
        place = folder.path(step)
        file = name or next(each for each in os.listdir(place) if each.startswith("rank"))
        os.truncate(os.path.join(place, file), 10)
    folder.close()
    folder = filled(tmp_path, [4, 5], keep_last=2)
    assert folder.steps() == [2, 3, 4, 5]


def test_what_is_not_ours_is_left_alone(tmp_path):
    folder = filled(tmp_path / "run", [1, 2, 3], keep_last=5)
    os.rename(folder.path(2), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder.path(2))
    (tmp_path / "run" / "step-00000001" / "notes.txt").write_text("the best one")
    (tmp_path / "run" / "log.txt").write_text("")
    (tmp_path / "run" / "step-00000000").mkdir()
    folder.close()
    folder = filled(tmp_path / "run", [4], keep_last=1)
    assert folder.steps() == [1, 2, 4]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert {"log.txt", "step-00000000"} <= set(names(tmp_path / "run"))


def test_what_is_being_read_stays_until_it_is_not(tmp_path):
    folder = filled(tmp_path, [1], keep_last=1)
    hold = LocalShelf(str(tmp_path)).hold(1)
    folder.save(2, state(2))
    assert folder.steps() == [1, 2]
    hold.close()
    folder.save(3, state(3))
    assert folder.steps() == [3]


def test_a_reader_that_has_no_lock_can_finish_all_the_same(tmp_path):
    folder = filled(tmp_path, [1], keep_last=1)
    with closing(storage_at(folder.path(1)).snapshot()) as snapshot:
        (name,) = [each for each in os.listdir(folder.path(1)) if each.startswith("rank")]
        with closing(snapshot.open(name)) as source:
            folder.save(2, state(2))
            assert folder.steps() == [2]
            data = bytearray(source.length)
            source.read_into(memoryview(data), 0)
    assert bytes(data).count(torch.tensor(1.0).numpy().tobytes()) >= 50


def test_readers_never_notice_that_old_ones_go(tmp_path):
    folder = filled(tmp_path, [0], keep_last=1)
    done = threading.Event()
    seen, errors = set(), []

    def read():
        reader = Folder(tmp_path)
        while not done.is_set():
            try:
                loaded = reader.load()
                assert loaded["weight"].tolist() == [float(loaded["step"])] * 50
                seen.add(loaded["step"])
            except BaseException as error:  # noqa: BLE001 - the test tells
                errors.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 20):
        folder.save(step, state(step))
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(seen) > 1


def test_what_dead_jobs_left_is_removed_and_what_living_ones_do_is_not(tmp_path):
    for name in (".step-00000007.saving/0123456789abcdef", ".step-00000003.removed-01234567"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rank0-0123456789abcdef.safetensors").touch()
    (tmp_path / ".step-00000007.saving" / "lock").touch()
    (tmp_path / ".step-00000008.saving" / "0123456789abcdef").mkdir(parents=True)
    Lock.take(tmp_path / ".step-00000008.saving", "the living", purpose="a save")
    (tmp_path / ".mine").mkdir()
    filled(tmp_path, [1])
    assert names(tmp_path) == [".mine", ".step-00000008.saving", "step-00000001"]


def test_two_jobs_are_refused_with_who_it_is_that_holds_it(tmp_path):
    folder = filled(tmp_path, [1])
    other = Folder(tmp_path)
    with pytest.raises(FolderInUse, match=f"process {os.getpid()} on"):
        other.save(2, state(2))
    assert other.load()["step"] == 1, "but it may read"
    folder.close()
    other.save(2, state(2))
    del other
    gc.collect()  # an error's traceback has a cycle
    filled(tmp_path, [3])  # whoever is forgotten holds nothing


def test_a_job_that_was_killed_holds_nothing(tmp_path):
    code = (
        "import sys, time; from phalanx.checkpoint._shelf import LocalShelf\n"
        "shelf = LocalShelf(sys.argv[1]); shelf.take('the other job'); print(flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        with pytest.raises(FolderInUse, match="the other job"):
            filled(tmp_path, [1])
        process.send_signal(signal.SIGKILL)
    assert filled(tmp_path, [1]).steps() == [1]


class InBackground(Checkpointer):
    """One of the user's own that writes in a thread, when it is let."""

    def __init__(self):
        self._inner = make_sync_checkpointer()
        self._threads = ThreadPoolExecutor(1)
        self.may_write = threading.Event()

    def save(self, path, state_dict, **kwargs):
        staged = Future()
        staged.set_result(None)

        def write():
            self.may_write.wait()
            if state_dict["step"] == 3:
                raise OSError("the disk is full")
            self._inner.save(path, state_dict, **kwargs)

        return staged, self._threads.submit(write)

    def load(self, path, state_dict=None, **kwargs):
        return self._inner.load(path, state_dict, **kwargs)

    def close(self):
        self._threads.shutdown()


def test_with_an_asynchronous_checkpointer_old_ones_go_when_the_new_one_is_written(tmp_path):
    with closing(InBackground()) as checkpointer:
        folder = Folder(tmp_path, keep_last=1, checkpointer=checkpointer)
        checkpointer.may_write.set()
        folder.save(1, state(1))[1].result()
        checkpointer.may_write.clear()
        _, written = folder.save(2, state(2))
        assert folder.latest() == 1
        with pytest.raises(SaveFailed, match="has step 2, which is after 1"):
            folder.save(1, state(1))
        checkpointer.may_write.set()
        written.result()
        _, written = folder.save(3, state(3))
        assert isinstance(written.exception(), OSError)
    assert folder.steps() == [2], "one that failed removes nothing"
    assert folder.load()["step"] == 2


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(InvalidArgument, match="at least the last one"):
        Folder(tmp_path, keep_last=0)
    with pytest.raises(InvalidArgument, match="keep_every"):
        Folder(tmp_path, keep_every=-1)
    with pytest.raises(InvalidArgument, match="-1"):
        Folder(tmp_path).save(-1, {})
    with pytest.raises(InvalidType, match="1.5"):
        Folder(tmp_path).save(1.5, {})


def test_it_lives_wherever_fsspec_reaches():
    url = "memory://test_folder/run"
    with filled(url, [1, 2, 3, 4], keep_last=2, keep_every=None) as folder:
        assert folder.steps() == [3, 4]
        assert folder.load()["step"] == 4
        folder.rewind(3)
        assert folder.latest() == 3


def use_a_folder(ctx, path, *, default_group):
    if default_group:
        dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.size)
    group = None if default_group else ctx.group()
    try:
        with Folder(path, keep_last=1, group=group) as folder:
            assert folder.latest() is None
            for step in (1, 2):
                folder.save(step, {"alike": torch.full((9,), step), "own": PerRank(ctx.rank)})
            loaded = folder.load()
            assert (loaded["alike"].tolist(), loaded["own"]) == ([2] * 9, ctx.rank)
            errors = [_error(lambda: folder.save(1, {})), _error(lambda: folder.load(1))]
            wanted = torch.zeros(9 + (ctx.rank == 1), dtype=torch.int64)
            return [*errors, _error(lambda: folder.load(state={"alike": wanted}))]
    finally:
        if default_group:
            dist.destroy_process_group()


def _error(call):
    with pytest.raises(CheckpointError) as caught:
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("default_group", [False, True])
def test_ranks_agree_and_fail_together(ranks, tmp_path, default_group):
    kwargs = {"default_group": default_group}
    one, two = ranks.run(use_a_folder, 2, args=(str(tmp_path),), kwargs=kwargs, timeout=40)
    assert [kind for kind, _ in one] == [SaveFailed, CheckpointNotFound, StateMismatch]
    assert [kind for kind, _ in two] == [SaveFailed, CheckpointNotFound, StateMismatch]
    assert one[:2] == two[:2]
    assert one[2][1].startswith("rank 1 could not load step 2: StateMismatch: alike is")


def test_an_object_is_not_given_half_of_its_state_where_there_are_more_ranks(tmp_path):
    """Its random numbers, say, of which ranks hold some alike and some not."""
    numbers = [{"rng": {"kind": "mt", "words": torch.full((3,), rank)}} for rank in range(2)]
    saved(tmp_path / "step-00000001", numbers)
    given = []

    class Loader:
        load_state_dict = given.append

    reader = CheckpointReader(RankInfo(2, 3))
    path = str(tmp_path / "step-00000001")
    with pytest.raises(MissingKeys, match=r"rng\.words differs .* for ranks 0, 1 only; .*rank="):
        reader.read(path, {"rng": Loader()})
    assert not given
    reader.read(path, {"rng": Loader()}, rank=0)
    assert given[0]["words"].tolist() == [0, 0, 0]


def refused(ctx, path):
    return _error(lambda: Folder(path, group=ctx.group()).save(1, {}))


def test_a_refusal_reaches_all_ranks(ranks, tmp_path):
    shelf = LocalShelf(str(tmp_path))
    shelf.take("the other job")
    for kind, message in ranks.run(refused, 3, args=(str(tmp_path),), timeout=40):
        assert kind is FolderInUse
        assert "is being saved to by the other job" in message
    shelf.release()
