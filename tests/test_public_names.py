"""The public names: what is exported is what is promised, and it is documented."""

import importlib
import inspect
import types

import pytest

PROMISED = {
    "phalanx": {"DDP", "DistributedDataParallel", "__version__", "errors"},
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
    "phalanx.ddp": {
        "DDP",
        "DistributedDataParallel",
        "GradBucket",
        "MixedPrecision",
        "ShardedOptimizer",
        "StepStats",
    },
    "phalanx.checkpoint": {
        "Alike",
        "AsyncCheckpointer",
        "BARRIER_REGISTRY",
        "Barrier",
        "BarrierConfig",
        "CheckpointProcess",
        "CheckpointProcessConfig",
        "CheckpointReader",
        "CheckpointStager",
        "CheckpointStagerConfig",
        "CheckpointWriter",
        "CheckpointWriterConfig",
        "Checkpointer",
        "CheckpointerConfig",
        "DefaultStager",
        "DistBarrier",
        "GroupBarrier",
        "PerRank",
        "RNGState",
        "RankInfo",
        "STATE_DICT",
        "SaveProgress",
        "SaveReport",
        "SyncCheckpointer",
        "TCPStoreBarrier",
        "WriteFuture",
        "WriterHook",
        "create_barrier_from_config",
        "make_async_checkpointer",
        "make_sync_checkpointer",
        "register_barrier",
        "register_codec",
        "wrap_future",
    },
    "phalanx.errors": {
        "BarrierError",
        "BarrierTimeout",
        "CheckpointError",
        "CheckpointNotFound",
        "CollectiveTimeout",
        "DamagedCheckpoint",
        "FolderInUse",
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
    "phalanx.join": {"Join", "JoinHook", "Joinable", "_JoinConfig"},
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
        "Died",
        "Fault",
        "RankContext",
        "RankFailures",
        "RankPool",
        "Stopped",
        "ThreadRanks",
        "delay",
        "faults",
        "kill",
        "over_groups",
        "stop",
    },
}


@pytest.mark.parametrize("name", PROMISED)
def test_what_is_exported_is_what_is_promised(name):
    module = importlib.import_module(name)
    assert set(module.__all__) == PROMISED[name]
    for each in module.__all__:
        assert hasattr(module, each)


@pytest.mark.parametrize("name", PROMISED)
def test_nothing_public_hides_from_the_list(name):
    module = importlib.import_module(name)
    visible = {
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "").startswith("phalanx")
    }
    assert visible <= PROMISED[name]


@pytest.mark.parametrize("name", PROMISED)
def test_everything_public_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for each in module.__all__:
        value = getattr(module, each)
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(
            "phalanx"
        ):
            assert value.__doc__, f"{name}.{each} has no docstring"
