"""Private names used by the tests of this package."""

from phalanx import _faultpoints
from phalanx.checkpoint import _store_connection, _tensor_file
from phalanx.checkpoint._barriers import GroupBarrier, find_ranks
from phalanx.checkpoint._checkpoint_directory import (
    LocalCheckpointDirectory,
    parse_step_name,
    step_name,
)
from phalanx.checkpoint._conversion import convert_checkpoint
from phalanx.checkpoint._coordination import Coordinator, StorageExchange
from phalanx.checkpoint._local_storage import (
    DirectoryLock,
    FileMessageStore,
    LocalSnapshot,
    LocalStorage,
)
from phalanx.checkpoint._manifest import (
    MANIFEST,
    MAX_DEPTH,
    MalformedManifest,
    Manifest,
    ManifestOutline,
    format_path,
    tensor_name,
)
from phalanx.checkpoint._progress import ProgressMeter
from phalanx.checkpoint._reader import OpenCheckpoint
from phalanx.checkpoint._replication import (
    ShardBounds,
    divide_among_ranks,
    find_differences,
    replicated_shards,
    sampled_digest,
    tensor_digest,
)
from phalanx.checkpoint._retention import RetentionPolicy, prune
from phalanx.checkpoint._staging import StagingBuffer, state_from_tree
from phalanx.checkpoint._state_encoding import decode, decode_state, encode
from phalanx.checkpoint._state_tree import (
    Branch,
    TensorLeaf,
    leaves,
    map_leaves,
    parse_state,
    rebuild_state,
)
from phalanx.checkpoint._storage import (
    MESSAGE_PREFIX,
    Source,
    checksum,
    data_file_name,
    files_to_remove,
    storage_at,
)
from phalanx.checkpoint._store_barrier import (
    OPEN,
    BarrierTimings,
    StoreBarrierMember,
    arrival_increment,
)
from phalanx.checkpoint._store_connection import StoreConnection
from phalanx.checkpoint._tensor_file import (
    TensorShard,
    nbytes,
    safetensors_type,
    tensor_memory,
    write_tensor_file,
)
from phalanx.checkpoint._torch_formats import verify_torch_checkpoint
from phalanx.checkpoint._verify import verify

__all__ = [
    "MANIFEST",
    "MAX_DEPTH",
    "MESSAGE_PREFIX",
    "OPEN",
    "BarrierTimings",
    "Branch",
    "Coordinator",
    "DirectoryLock",
    "FileMessageStore",
    "GroupBarrier",
    "LocalCheckpointDirectory",
    "LocalSnapshot",
    "LocalStorage",
    "MalformedManifest",
    "Manifest",
    "ManifestOutline",
    "OpenCheckpoint",
    "ProgressMeter",
    "RetentionPolicy",
    "ShardBounds",
    "Source",
    "StagingBuffer",
    "StorageExchange",
    "StoreBarrierMember",
    "StoreConnection",
    "TensorLeaf",
    "TensorShard",
    "_faultpoints",
    "_store_connection",
    "_tensor_file",
    "arrival_increment",
    "checksum",
    "convert_checkpoint",
    "data_file_name",
    "decode",
    "decode_state",
    "divide_among_ranks",
    "encode",
    "files_to_remove",
    "find_differences",
    "find_ranks",
    "format_path",
    "leaves",
    "map_leaves",
    "nbytes",
    "parse_state",
    "parse_step_name",
    "prune",
    "rebuild_state",
    "replicated_shards",
    "safetensors_type",
    "sampled_digest",
    "state_from_tree",
    "step_name",
    "storage_at",
    "tensor_digest",
    "tensor_memory",
    "tensor_name",
    "verify",
    "verify_torch_checkpoint",
    "write_tensor_file",
]
