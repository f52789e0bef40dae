"""Names and signatures match upstream's experimental checkpointer."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
import torch
from torch.distributed.checkpoint import _experimental as upstream

from phalanx import checkpoint
from phalanx.checkpoint import barriers, components

MODULES = [
    importlib.import_module(f"{upstream.__name__}.{each.name}")
    for each in pkgutil.iter_modules(upstream.__path__)
]
INTERNAL = {
    # Messages between its process and parent; ours differ.
    "RequestType",
    "WorkerRequest",
    "WorkerResponse",
    # Defaults of arguments.
    "default_subprocess_init_fn",
    "default_writer_init_fn",
}


def public(module):
    """Return the public classes and functions that a module defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }


OURS = {
    name: getattr(module, name)
    for module in (checkpoint, barriers, components)
    for name in module.__all__
}
THEIRS = {
    name: value
    for module in MODULES
    for name, value in public(module).items()
    if name not in INTERNAL
}


def test_every_upstream_name_exists():
    assert len(THEIRS) >= 22, "or upstream was not understood"
    promised = {*THEIRS, *upstream.__all__, "BARRIER_REGISTRY", "STATE_DICT"}
    assert promised <= {*OURS}
    assert components.STATE_DICT == upstream.STATE_DICT


def test_one_import_line_is_enough():
    for name in upstream.__all__:
        assert getattr(checkpoint, name) is OURS[name]


def calls():
    for name, theirs in THEIRS.items():
        if not inspect.isclass(theirs):
            yield name
            continue
        methods = {each for each in vars(theirs) if not each.startswith("_")}
        methods = {each for each in methods if inspect.isfunction(getattr(theirs, each))}
        yield from (f"{name}.{each}" for each in sorted({"__init__", *methods}))


def find(root, dotted):
    for name in dotted.split("."):
        root = root[name] if isinstance(root, dict) else getattr(root, name)
    return root


@pytest.mark.parametrize("name", [*calls()])
def test_signature_matches_upstream(name):
    theirs = inspect.signature(find(THEIRS, name)).parameters
    ours = inspect.signature(find(OURS, name)).parameters
    positional = [each for each in theirs.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == [each.name for each in positional], "in this order"
    for each in theirs.values():
        if each.kind is each.VAR_POSITIONAL:
            continue  # abstract ones take anything
        assert each.name in ours or each.name == "kwargs"
        if each.name in ours and not is_made_anew(each.default):
            assert same_default(ours[each.name].default, each.default), each.name
    for each in ours.values():
        is_extra = each.name not in theirs and each.kind not in (
            each.VAR_POSITIONAL,
            each.VAR_KEYWORD,
        )
        assert not is_extra or each.default is not each.empty, f"{each.name} must not be asked for"


def is_made_anew(default):
    """Whether the default comes from a dataclass default_factory."""
    return type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"


def same_default(ours, theirs):
    if inspect.isfunction(theirs):
        return inspect.isfunction(ours) and ours.__name__ == theirs.__name__
    if dataclasses.is_dataclass(theirs):
        return ours is None  # a new instance per call, not a shared one
    return ours == theirs


@pytest.mark.parametrize("name", [name for name in THEIRS if name.endswith(("Config", "Info"))])
def test_config_fields_and_defaults_match_upstream(name):
    theirs, ours = THEIRS[name], OURS[name]
    fields = [each.name for each in dataclasses.fields(theirs)]
    assert [each.name for each in dataclasses.fields(ours)][: len(fields)] == fields
    needed = {"global_rank": 1, "global_world_size": 2} if name == "RankInfo" else {}
    one, two = ours(**needed), theirs(**needed)
    for each in fields:
        if not dataclasses.is_dataclass(getattr(two, each)):
            assert getattr(one, each) == getattr(two, each), each


@pytest.mark.parametrize("name", [name for name, each in THEIRS.items() if inspect.isclass(each)])
def test_abstract_methods_and_bases_match_upstream(name):
    theirs, ours = THEIRS[name], OURS[name]
    abstract = getattr(theirs, "__abstractmethods__", set())
    assert getattr(ours, "__abstractmethods__", set()) == abstract
    for base in theirs.__mro__[1:]:
        if base.__name__ in THEIRS:
            assert issubclass(ours, OURS[base.__name__])


def test_errors_have_upstreams_classes(tmp_path):
    checkpointer = checkpoint.make_sync_checkpointer()
    with pytest.raises(FileNotFoundError):
        checkpointer.load(str(tmp_path / "nowhere"))
    path = str(tmp_path / "there")
    checkpointer.save(path, {"weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="missing keys: \\['other'\\]"):
        checkpointer.load(path, {"other": torch.zeros(3)}, strict=True)
    with pytest.raises(RuntimeError, match="weight"):
        checkpointer.load(path, {"weight": torch.zeros(4)})
    config = barriers.BarrierConfig(barrier_type="no_such_thing")
    with pytest.raises(ValueError, match="no_such_thing"):
        barriers.create_barrier_from_config(config)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_non_blocking_staging_needs_an_accelerator():
    """Upstream refuses its own default on a CPU; ours refuses only what was asked for."""
    for config, stager in (
        (upstream.CheckpointStagerConfig, upstream.DefaultStager),
        (components.CheckpointStagerConfig, components.DefaultStager),
    ):
        for asynchronous in (False, True):
            wanted = config(
                use_pinned_memory=False, use_async_staging=asynchronous, use_non_blocking_copy=True
            )
            with pytest.raises(AssertionError, match="accelerator"):
                stager(wanted)
            stager(config(use_pinned_memory=False, use_non_blocking_copy=False)).close()
    default = components.CheckpointStagerConfig(use_async_staging=False)
    assert repr(default.use_non_blocking_copy) == "True"
    for each in (default, dataclasses.replace(default, use_shared_memory=False)):
        components.DefaultStager(each).close()
