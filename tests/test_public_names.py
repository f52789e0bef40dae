"""Public names: the exports match the promised list and are documented."""

import importlib
import inspect
import pkgutil
import types

import pytest

PROMISED = {
    "phalanx": {
        "DDP",
        "DistributedDataParallel",
        "__version__",
        "errors",
        "gather_uneven",
        "spawn",
        "uneven",
    },
    "phalanx.checkpoint": {
        "CheckpointManager",
        "CheckpointerConfig",
        "PerRank",
        "PreemptionGuard",
        "RNGState",
        "Replicated",
        "make_async_checkpointer",
        "make_sync_checkpointer",
        "register_codec",
    },
    "phalanx.checkpoint.barriers": {
        "BARRIER_REGISTRY",
        "Barrier",
        "BarrierConfig",
        "DistBarrier",
        "GroupBarrier",
        "TCPStoreBarrier",
        "create_barrier_from_config",
        "register_barrier",
    },
    "phalanx.checkpoint.components": {
        "AsyncCheckpointer",
        "CheckpointProcess",
        "CheckpointProcessConfig",
        "CheckpointReader",
        "CheckpointStager",
        "CheckpointStagerConfig",
        "CheckpointWriter",
        "CheckpointWriterConfig",
        "Checkpointer",
        "DefaultStager",
        "RankInfo",
        "STATE_DICT",
        "SaveProgress",
        "SaveReport",
        "SyncCheckpointer",
        "WriteFuture",
        "WriterHook",
        "wrap_future",
    },
    "phalanx.ddp": {
        "DDP",
        "DistributedDataParallel",
        "GradBucket",
        "MixedPrecision",
        "ShardedOptimizer",
        "StepStats",
        "SyncBatchNorm",
    },
    "phalanx.elastic": {
        "ElasticLoader",
        "ElasticRun",
        "MembershipChange",
        "MicroBatch",
        "Step",
    },
    "phalanx.errors": {
        "BarrierError",
        "BarrierTimeout",
        "CheckpointError",
        "CheckpointNotFound",
        "CollectiveTimeout",
        "DamagedCheckpoint",
        "CheckpointDirectoryInUse",
        "GroupAborted",
        "GroupError",
        "HookError",
        "InternalError",
        "InvalidArgument",
        "InvalidHook",
        "InvalidMesh",
        "InvalidState",
        "InvalidType",
        "MissingKeys",
        "MisuseError",
        "NotInMesh",
        "PeerLeft",
        "PeerLost",
        "PhalanxError",
        "RankMismatch",
        "RankReport",
        "RanksFailed",
        "RanksTimeout",
        "RendezvousError",
        "RendezvousTimeout",
        "SaveFailed",
        "SaveTimeout",
        "StateMismatch",
        "UnevenInputs",
        "UnknownAxis",
        "UnknownOption",
        "Unprepared",
        "UnsupportedState",
        "WriterLost",
    },
    "phalanx.groups": {
        "DEFAULT_TIMEOUT",
        "ProcessGroup",
        "ProcessGroupFactory",
        "Record",
        "ReduceOp",
        "Traits",
        "Work",
        "current_process_group",
        "new_group",
        "process_group",
        "register_backend",
    },
    "phalanx.join": {
        "Join",
        "JoinHook",
        "JoinReport",
        "Joinable",
        "_JoinConfig",
        "gather_uneven",
        "uneven",
    },
    "phalanx.mesh": {
        "DeviceMesh",
        "FlatLayout",
        "MeshLayout",
        "_FlatLayout",
        "_MeshEnv",
        "_MeshLayout",
        "_mesh_resources",
        "init_device_mesh",
    },
    "phalanx.testing": {
        "Batch",
        "Died",
        "Fault",
        "RankContext",
        "RankFailures",
        "RankPool",
        "Stopped",
        "ThreadRanks",
        "UnevenBatches",
        "delay",
        "faults",
        "kill",
        "over_groups",
        "stop",
        "uneven_batches",
    },
}


def is_package(name):
    return hasattr(importlib.import_module(name), "__path__")


@pytest.mark.parametrize("name", PROMISED)
def test_exports_match_the_promised_names(name):
    module = importlib.import_module(name)
    assert set(module.__all__) == PROMISED[name]
    for each in module.__all__:
        assert hasattr(module, each)


@pytest.mark.parametrize("name", PROMISED)
def test_every_public_object_is_listed(name):
    module = importlib.import_module(name)
    visible = {
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "").startswith("phalanx")
    }
    assert visible <= PROMISED[name]


def listed(name):
    return {each for each in dir(importlib.import_module(name)) if each[:1] != "_"}


@pytest.mark.parametrize("name", [each for each in PROMISED if is_package(each)])
def test_dir_of_a_package_shows_public_names_and_modules_only(name):
    """What `dir` and shell completion show: nothing missing, and no mere imports."""
    module = importlib.import_module(name)
    public = {each for each in module.__all__ if each[:1] != "_"}
    modules = {each.name for each in pkgutil.iter_modules(module.__path__)}
    assert public <= listed(name) <= public | modules


@pytest.mark.parametrize("name", PROMISED)
def test_every_public_name_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for each in module.__all__:
        value = getattr(module, each)
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(
            "phalanx"
        ):
            assert value.__doc__, f"{name}.{each} has no docstring"
