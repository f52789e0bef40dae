"""Drop-in: what is replaced in a program for torch, and that nothing is when the switch is off."""

import inspect
import io
import operator
import os
import subprocess
import sys
import textwrap
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx_autoload
from phalanx._drop_in import Unreplaceable, _ReplacedName, replace_arguments, replace_backend
from phalanx.env import find_accelerator, is_drop_in
from phalanx.errors import InvalidArgument

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}

on_cpus = pytest.mark.skipif(find_accelerator() is not None, reason="replaces on CPUs only")


# -- decisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "replaced"),
    [
        (None, "auto"),
        ("undefined", "auto"),
        ("gloo", "auto"),
        ("GLOO", "auto"),
        ("mpi", "auto"),
        ("cpu:gloo", "cpu:auto"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:auto"),
    ],
)
def test_a_cpu_backend_becomes_auto(asked, replaced):
    assert replace_backend(asked) == replaced


@pytest.mark.parametrize("asked", ["cpu:gloo,foo", "cpu:gloo,cpu:gloo", "cpu:gloo,"])
def test_an_invalid_backend_stays_invalid(asked):
    with pytest.raises(ValueError, match=r"Invalid device|Duplicate device"):
        dist.distributed_c10d.BackendConfig(replace_backend(asked))


@pytest.mark.parametrize("asked", ["nccl", "shm", "ucc", "fake", "cuda:nccl", "cpu:ucc", "a:b:c"])
def test_other_backends_are_kept(asked):
    with pytest.raises(Unreplaceable, match=asked):
        replace_backend(asked)


@pytest.mark.parametrize(
    ("given", "environ", "reason"),
    [
        ({"backend": "gloo", "pg_options": object()}, LAUNCHED, "pg_options"),
        ({"device_id": torch.device("cuda:0")}, LAUNCHED, "device_id"),
        ({"backend": "mpi"}, {"RANK": "0"}, "MASTER_ADDR"),
    ],
)
def test_calls_that_only_torch_can_serve_are_kept(given, environ, reason):
    with pytest.raises(Unreplaceable, match=reason):
        replace_arguments(given, environ)
    assert replace_arguments({"backend": "mpi"}, LAUNCHED) == "auto"


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), (" 1 ", True)])
def test_the_switch_is_0_or_1(value, expected):
    assert is_drop_in({"PHALANX_DROP_IN": value}) is expected


@pytest.mark.parametrize("value", ["yes", "2", "-1"])
def test_another_value_of_the_switch_is_an_error(value):
    with pytest.raises(InvalidArgument, match=f"PHALANX_DROP_IN must be.*{value}"):
        is_drop_in({"PHALANX_DROP_IN": value})


# -- the replaced name -------------------------------------------------------------------------


def replaced_name(found):
    made = types.ModuleType("holder")
    made.Name = "theirs"
    descriptor = _ReplacedName("Name", lambda: found)
    made.__class__ = type("Holder", (types.ModuleType,), {"Name": descriptor})
    return made


def read_as(importer, module):
    scope = {"__name__": importer, "module": module}
    exec("value = module.Name", scope)  # noqa: S102
    return scope["value"]


@pytest.mark.parametrize("importer", ["torch.distributed.checkpoint", "phalanx.ddp._interop"])
def test_modules_of_torch_and_ours_keep_the_name(importer):
    assert read_as(importer, replaced_name("ours")) == "theirs"


@pytest.mark.parametrize("importer", ["__main__", "accelerate.accelerator", "torchvision"])
def test_others_see_the_replacement(importer):
    assert read_as(importer, replaced_name("ours")) == "ours"
    assert read_as(importer, replaced_name(None)) == "theirs"  # as nothing can be replaced


def test_a_program_may_assign_the_name_itself():
    module = replaced_name("ours")
    module.Name = "mine"
    assert module.Name == "mine"
    del module.Name
    assert not hasattr(module, "Name")


@pytest.mark.parametrize("restored", ["theirs", "ours"])
def test_a_name_that_the_program_restores_is_replaced_again(restored):
    module = replaced_name("ours")
    module.Name = "mine"
    module.Name = restored  # mock.patch has read the module's own name, others ours
    assert module.Name == "ours"
    assert read_as("torch", module) == "theirs"


def test_code_without_a_frame_sees_the_replacement_whoever_calls_it():
    """As guards of compiled code do, which torch may call."""
    scope = {"__name__": "torch.nn", "read": operator.attrgetter("Name")}
    scope["module"] = replaced_name("ours")
    exec("value = read(module)", scope)  # noqa: S102
    assert scope["value"] == "ours"


# -- the entry point ---------------------------------------------------------------------------


def test_the_switch_is_off_and_nothing_is_replaced():
    import torch.nn.parallel.distributed as parallel
    from torch.distributed import distributed_c10d as c10d

    assert "PHALANX_DROP_IN" not in os.environ
    assert type(parallel) is type(torch.nn.parallel) is types.ModuleType
    assert torch.nn.parallel.DistributedDataParallel is TorchDDP is parallel.DistributedDataParallel
    for function in (dist.init_process_group, dist.get_backend):
        assert function is getattr(c10d, function.__name__)
        chain = [function]
        inspect.unwrap(function, stop=chain.append)
        assert all(each.__globals__["__name__"].startswith("torch.") for each in chain)
    assert "AUTO" not in vars(dist.Backend)


def test_the_entry_point_takes_less_than_a_millisecond(monkeypatch):
    class Backend:
        backend_list = ()

        @staticmethod
        def register_backend(*args, **kwargs):
            registered.append((args[0], kwargs))

    registered = []
    monkeypatch.setitem(
        sys.modules, phalanx_autoload.REGISTRY_MODULE, types.SimpleNamespace(Backend=Backend)
    )
    times = []
    for _ in range(20):
        began = time.perf_counter()
        phalanx_autoload.load()
        times.append(time.perf_counter() - began)
    assert registered == [("shm", {"extended_api": True, "devices": ["cpu"]})] * 20
    assert min(times) < 0.001


def python(source, *, env=None, before=(), **options):
    """Run a program in a new process and return the completed process."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PHALANX_", "TORCH_"))}
    return subprocess.run(
        [sys.executable, *before, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**inherited, **(env or {})},
        check=False,
        **options,
    )


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_shm_needs_no_import_of_phalanx():
    """Registering costs next to nothing; the package is imported when a group is created."""
    done = python(
        """
        import sys
        import torch, torch.distributed as dist
        loaded = [name for name in sys.modules if name.partition(".")[0] == "phalanx"]
        assert not loaded, loaded
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        group = dist.new_group(backend="shm")
        print(type(group).__module__, dist.get_backend(group))
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",),
                                     backend_override={"dp": "shm"})
        print(type(mesh.get_group()).__module__)
        """
    )
    assert done.returncode == 0, done.stderr
    ours = "phalanx.groups._process_group"
    assert done.stdout.split() == [ours, "shm", ours]


@pytest.mark.slow
def test_torchs_own_switch_turns_the_entry_point_off():
    source = "import torch.distributed as dist; print('shm' in dist.Backend.backend_list)"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(source, env=off).stdout == "False\n"
    assert python(f"import phalanx; {source}", env=off).stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["raise OSError('broken')", "raise SystemExit(3)", "1 +"])
def test_a_broken_installation_does_not_break_torch(tmp_path, failure):
    (tmp_path / "phalanx").mkdir()
    (tmp_path / "phalanx" / "__init__.py").write_text(failure)
    env = {"PHALANX_DROP_IN": "1", **ONE_RANK}
    # In front of the editable installation's finder, too.
    source = f"""
        import importlib.machinery, sys
        class First:
            def find_spec(name, path=None, target=None):
                if name == "phalanx":
                    return importlib.machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])
        sys.meta_path.insert(0, First)
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print(dist.get_backend())
    """
    done = python(source, env=env)
    assert (done.returncode, done.stdout) == (0, "gloo\n"), done.stderr
    assert done.stderr.count("phalanx drop-in: nothing replaced (") == 1


def test_an_error_that_cannot_be_printed_does_not_break_torch(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setitem(sys.modules, "phalanx._drop_in", None)  # so that the import fails
    monkeypatch.setenv("PHALANX_DROP_IN", "1")
    monkeypatch.setenv("RANK", "0")
    phalanx_autoload.load()


# -- whole programs ----------------------------------------------------------------------------

NAMES = """
    import pickle, sys
    import torch, torch.distributed as dist
    assert "phalanx.groups" not in sys.modules, "import torch stays cheap"
    import torch.nn.parallel as parallel
    import torch.nn.parallel.distributed
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.nn.parallel.distributed import DistributedDataParallel
    from torch.distributed.checkpoint import state_dict as of_torch
    import phalanx

    ours = phalanx.DDP
    assert DDP is ours and DistributedDataParallel is ours
    assert parallel.DistributedDataParallel is ours
    assert torch.nn.parallel.distributed.DistributedDataParallel is ours
    scope = {}
    exec("from torch.nn.parallel import *", scope)
    assert scope["DistributedDataParallel"] is ours
    assert of_torch.DDP is not ours and issubclass(ours, of_torch.DDP)
    assert pickle.loads(pickle.dumps(DDP)) is DDP
    assert pickle.loads(pickle.dumps(dist.init_process_group)) is dist.init_process_group

    store = dist.HashStore()
    dist.init_process_group(store=store, rank=0, world_size=1)
    assert dist.get_backend() == "undefined"  # what torch says for an omitted one
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "gloo" and dist.get_backend() is dist.Backend.GLOO
    assert dist.group.WORLD.backend == "shm"
    assert dist.new_group().backend == "shm"
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    dist.monitored_barrier()

    class Mine(DDP):
        pass

    model = DDP(torch.nn.Linear(2, 1))
    assert type(model) is DDP and isinstance(model, of_torch.DDP)
    assert isinstance(Mine(torch.nn.Linear(2, 1)), ours)
    assert of_torch.get_model_state_dict(model).keys() == {"weight", "bias"}
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is DDP
    try:
        dist.init_process_group()
    except ValueError as error:
        assert "twice" in str(error)
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()
    dist.init_process_group("auto", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "auto"
    dist.destroy_process_group()

    dist.init_device_mesh("cpu", (1,))  # which creates the default group, in a module of torch
    assert dist.group.WORLD.backend == "shm"
"""


@on_cpus
def test_every_name_of_ddp_is_ours_and_the_backend_reads_as_asked_for():
    done = python(NAMES, env={"PHALANX_DROP_IN": "1", **ONE_RANK})
    assert done.returncode == 0, done.stderr
    line = (
        "phalanx drop-in: backend (omitted) -> auto (shm); DistributedDataParallel -> phalanx.DDP"
    )
    assert [each for each in done.stderr.splitlines() if "phalanx" in each] == [line]


COMPILED = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DDP(torch.nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(3, 2)).sum().backward()
    assert model.module.bias.grad.item() == 3

    class Asks(torch.nn.Module):
        def forward(self, x):
            return x + (10 if type(model) is torch.nn.parallel.DistributedDataParallel else 0)

    asks = Asks()
    asks.compile(backend="eager")
    assert torch.nn.Sequential(asks)(torch.ones(1)).item() == 11  # guards run in a frame of torch
    dist.destroy_process_group()
"""


@on_cpus
@pytest.mark.slow
def test_compiled_code_sees_the_replaced_names():
    done = python(COMPILED, env={"PHALANX_DROP_IN": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "backend", "reason", "ddp"),
    [
        ("cuda", "gloo", "this machine has an accelerator: cuda", "kept (this machine has"),
        (None, "fake", "backend 'fake' is not gloo, mpi or omitted", "-> phalanx.DDP"),
    ],
)
def test_what_cannot_be_replaced_runs_as_before_and_says_why(accelerator, backend, reason, ddp):
    done = python(
        f"""
        import phalanx.env
        phalanx.env.find_accelerator = lambda: {accelerator!r}
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        dist.init_process_group({backend!r}, rank=0, world_size=1, store=dist.HashStore())
        dist.destroy_process_group()
        dist.init_process_group({backend!r}, rank=0, world_size=1, store=dist.HashStore())
        print(dist.get_backend(), type(dist.group.WORLD).__module__.partition(".")[0])
        """,
        env={"PHALANX_DROP_IN": "1"},
    )
    assert (done.returncode, done.stdout) == (0, f"{backend} torch\n"), done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "drop-in" in each]
    assert line.startswith(f"phalanx drop-in: backend {backend} kept ({reason}); ")
    assert f"DistributedDataParallel {ddp}" in line


SAVES = """
    import pickle, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    class Mine(DDP):
        pass
    torch.save(DDP(torch.nn.Linear(2, 1)), "whole.pt")
    torch.save(Mine(torch.nn.Linear(2, 1)), "mine.pt")
    with open("whole.pickle", "wb") as file:
        pickle.dump(DDP(torch.nn.Linear(2, 1)), file)
"""
LOADS = """
    import pickle
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from phalanx.errors import InvalidState
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    class Mine(DDP):
        pass
    whole = torch.load("whole.pt", weights_only=False)
    assert type(whole).__module__ == "torch.nn.parallel.distributed", type(whole)
    with open("again.pickle", "wb") as file:
        pickle.dump(whole, file)
    with open("again.pickle", "rb") as file:
        assert type(pickle.load(file)) is type(whole)
    for load in (lambda: torch.load("mine.pt", weights_only=False),
                 lambda: pickle.load(open("whole.pickle", "rb"))):
        try:
            load()
        except InvalidState as error:
            assert "was pickled with torch's DistributedDataParallel" in str(error)
        else:
            raise AssertionError("no error")
"""
LOADS_AGAIN = """
    import pickle, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open("again.pickle", "rb") as file:
        print(type(pickle.load(file)).__module__, "phalanx" in sys.modules)
"""


@on_cpus
@pytest.mark.slow
def test_whole_modules_that_torchs_class_pickled(tmp_path):
    for source, switch in [(SAVES, "0"), (LOADS, "1"), (LOADS_AGAIN, "0")]:
        done = python(source, env={"PHALANX_DROP_IN": switch}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.nn.parallel.distributed False\n"
