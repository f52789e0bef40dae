"""Every use of torch's DDP and device mesh in torch, Accelerate, Lightning and Transformers.

`upstream_uses.txt` lists them by function; tools/upstream_uses.py finds them in installed packages.
The tables below say how our objects satisfy each attribute, and the tests check that they do.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.ddp import DDP
from phalanx.groups import new_group
from phalanx.mesh import DeviceMesh, init_device_mesh

SOURCE = Path(__file__).parents[1] / "tools" / "upstream_uses.py"
SPEC = importlib.util.spec_from_file_location("upstream_uses", SOURCE)
upstream_uses = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(upstream_uses)

OF_OTHERS = "of another object"
"""The function uses the same variable for something else, which has the attribute."""
IN_NEITHER = "in neither class"
"""The function asks whether the attribute is there, or sets it."""
OURS = "defined by our class"
TORCHS = "inherited from torch's class"
MODULES = "inherited from nn.Module"
STATE = "set by our constructor"
CHECK = "a check of the type"

DDP_ATTRIBUTES = {
    CHECK: {"__init__", "isinstance", "issubclass", "subclass"},
    OURS: {
        "__getstate__", "__module__", "_get_active_ddp_module", "_get_data_parallel_params",
        "_get_ddp_logging_data", "_post_forward", "_pre_forward", "forward", "join_hook", "no_sync",
        "register_comm_hook", "require_backward_grad_sync",
    },
    TORCHS: {"_active_ddp_module", "train"},
    MODULES: {"__class__", "__dict__", "module", "named_modules", "parameters", "to"},
    STATE: {
        "bucket_bytes_cap", "device", "find_unused_parameters", "mixed_precision", "process_group",
        "reducer", "require_forward_param_sync", "static_graph",
    },
    IN_NEITHER: {
        "_converted_to_transformer_engine", "_is_accelerate_prepared", "_orig_mod",
        "_original_forward", "hf_device_map", "is_loaded_in_4bit", "is_loaded_in_8bit",
    },
    OF_OTHERS: {
        # torch._dynamo.guards pickles guards on objects of any kind
        "__closure__", "__code__", "__defaults__", "__func__", "__mro__", "__name__",
        "__qualname__", "__self__", "__tensor_flatten__", "_fields", "_opname", "_overloadname",
        "_qualified_op_name", "_torch_handler_name", "_torch_unpickler", "cell_contents", "copy",
        "grad", "name", "namespace", "node", "pytype", "raw_repr", "requires_grad", "serialize",
        # torch.distributed.pipelining has FSDP modules too
        "set_is_last_backward", "set_requires_gradient_sync", "set_reshard_after_backward",
    },
}  # fmt: skip
MESH_ATTRIBUTES = {
    CHECK: {"__init__", "isinstance"},
    OURS: {
        "__getitem__", "_concatenate", "_dim_group_names", "_flatten", "_get_root_mesh",
        "_get_slice_mesh_layout", "_rank_map", "get_group", "get_local_rank", "get_rank", "mesh",
        "size",
    },
    TORCHS: {
        "_compute_coordinates_from_mesh", "_get_mesh_tensor_from_full_mesh",
        "_is_current_rank_part_of_mesh", "_stable_hash", "_sym_get_coordinate", "device_type",
        "get_coordinate", "mesh_dim_names", "ndim", "shape",
    },
    STATE: {"_flatten_mapping", "_layout", "_mesh_dim_names"},
    OF_OTHERS: {
        "DeviceMesh",  # torch.distributed.device_mesh, the module
        "append", "permute", "values",  # lists, image coordinates and dicts called ..._mesh
        "value",  # of the compiler's variable for a mesh
        # custom operators of torch.ops.device_mesh
        "_get_flattened_submesh", "_runtime_compute_coordinate_on_dim", "register_fake",
    },
}  # fmt: skip
REDUCER_ATTRIBUTES = {
    OURS: {"_delay_all_reduce", "_rebuild_buckets", "_run_allreduce_hook", "prepare_for_backward"},
}
TABLES = {"DDP": DDP_ATTRIBUTES, "DeviceMesh": MESH_ATTRIBUTES, "Reducer": REDUCER_ATTRIBUTES}


def attributes_in_table(kind):
    uses = upstream_uses.read_table()
    return set().union(*(found for (_, used), found in uses.items() if used == kind))


@pytest.mark.parametrize("kind", TABLES)
def test_every_used_attribute_is_explained_once(kind):
    explained = [name for names in TABLES[kind].values() for name in names]
    assert sorted(explained) == sorted(attributes_in_table(kind))


def test_the_table_covers_all_four_packages():
    packages = {place.partition(".")[0] for place, _ in upstream_uses.read_table()}
    assert packages == {"torch", "accelerate", "lightning", "transformers"}


def owner(obj, name):
    """Return the class that defines an attribute, or None if the object itself has it."""
    if name in vars(obj) or (isinstance(obj, nn.Module) and name in obj._modules):
        return None
    return next((each for each in type(obj).__mro__ if name in vars(each)), None)


def check(tables, ours, theirs, torchs_class):
    """Compare what our object has with the table, and with torch's own object."""
    for name in tables.get(OURS, ()):
        assert owner(ours, name) is type(ours), name
    for name in tables.get(TORCHS, ()):
        assert owner(ours, name) is torchs_class, name
    for name in tables.get(MODULES, ()):
        assert owner(ours, name) in (nn.Module, object, None), name
    for name in tables.get(STATE, ()):
        assert name in vars(ours), name
    for name in tables.get(IN_NEITHER, ()):
        assert not hasattr(ours, name), name
        assert not hasattr(theirs, name), name
    for how in (OURS, TORCHS, MODULES, STATE):
        for name in tables.get(how, ()):
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert callable(mine) == callable(other), name
            if isinstance(other, bool | int | str | tuple | torch.Tensor | torch.device | None):
                assert type(mine) is type(other), name


def test_ddp_has_what_others_use():
    group = new_group("fake", rank=0, world_size=1)
    ours, theirs = (kind(nn.Linear(2, 2), process_group=group) for kind in (DDP, TorchDDP))
    assert isinstance(ours, TorchDDP)
    assert issubclass(ours.__class__, TorchDDP)
    check(DDP_ATTRIBUTES, ours, theirs, TorchDDP)
    check(REDUCER_ATTRIBUTES, ours.reducer, theirs.reducer, c10d.Reducer)
    group.shutdown()


def test_mesh_has_what_others_use():
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        made = [
            init("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            for init in (init_device_mesh, torch_init_device_mesh)
        ]
        assert isinstance(made[0], TorchMesh)
        assert issubclass(DeviceMesh, TorchMesh)
        check(MESH_ATTRIBUTES, *made, TorchMesh)
        made[0].shutdown()
    finally:
        dist.destroy_process_group()


PROGRAM = """
from torch.nn.parallel import DistributedDataParallel as DDP

class Wrapper:
    def step(self, model: "DDP | None", part, group):
        if isinstance(group, (DDP, int)):
            group.no_sync()
        getattr(model, "new_attribute", None)
        self.device_mesh["dp"].get_group()
        with part.mesh:
            part.mesh.mesh.tolist()
        return model.reducer.prepare_for_backward([])

    def other(self, spec):
        kinds = (DDP, int)
        if type(spec) is DDP or isinstance(spec, kinds):
            return spec.module
"""


def test_scanner_finds_each_kind_of_use(tmp_path, monkeypatch):
    package = tmp_path / "scanned"
    package.mkdir()
    (package / "__init__.py").write_text("import never_installed\n")
    (package / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    step, other = (f"scanned.program:Wrapper.{name}" for name in ("step", "other"))
    assert upstream_uses.scan("scanned") == {
        (step, "DDP"): {"isinstance", "no_sync", "new_attribute", "reducer"},
        (step, "Reducer"): {"prepare_for_backward"},
        (step, "DeviceMesh"): {"__getitem__", "__enter__", "get_group", "mesh"},
        (other, "DDP"): {"exact_type", "isinstance", "module"},
    }
    assert len(upstream_uses.differences("scanned")) == 4


def test_scanner_fails_for_a_package_that_is_not_installed():
    with pytest.raises(SystemExit, match="never_installed is not installed"):
        upstream_uses.scan("never_installed")


@pytest.mark.slow
def test_the_table_lists_every_use_in_torch():
    """`make interop` runs the same for the other packages."""
    assert upstream_uses.differences("torch") == []
    assert "accelerate" not in sys.modules
