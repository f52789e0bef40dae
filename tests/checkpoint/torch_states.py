"""States that torch saves, and its own writers."""

import pickle
import shutil
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _experimental as upstream
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


def kinds(seed=0):
    """Return a state with tensors and values of every kind."""
    torch.manual_seed(seed)
    base = torch.randn(3, 4)
    return {
        "float32": base.clone(),
        "bfloat16": base.bfloat16(),
        "complex64": torch.complex(base, -base),
        "conjugate": torch.complex(base, base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "float8": base.to(torch.float8_e4m3fn),
        "uint16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
        "bool": base > 0,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": torch.randn(4, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.arange(100)[3:90:7],
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {
            "list": [torch.ones(2), {"deep": [torch.zeros(1), 3]}, "text"],
            "tuple": (torch.full((2,), 7), 2.5),
            "numbers": [1, 2.5, None, True],
        },
        "betas": (0.9, 0.999),
        "nan": float("nan"),
        "large": 1 << 100,
        "none": None,
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }


def zeros_like(state):
    """Return a state of the same structure to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.detach().resolve_conj().resolve_neg())
    if isinstance(state, dict):
        return {key: zeros_like(each) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(zeros_like, state))
    return None


def save_dcp(path, state, **options):
    """Save with torch's DCP, in this process alone."""
    writer = dcp.FileSystemWriter(path, sync_files=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "single process"
        dcp.save(state, storage_writer=writer, no_dist=True)


def save_archives(path, states):
    """Save with torch's experimental checkpointer, one state per rank."""
    for rank, state in enumerate(states):
        info = upstream.RankInfo(global_rank=rank, global_world_size=len(states))
        writer = upstream.CheckpointWriter(upstream.CheckpointWriterConfig(), info)
        writer.write(str(path), state)


def sharded_state():
    generator = torch.Generator().manual_seed(1)
    return {
        "grid": torch.randn(5, 7, generator=generator),
        "rows": torch.randn(4, 3, generator=generator).bfloat16(),
    }


def sharded_folder(path):
    """Write the folder that ranks write whose tensors are sharded: a file for each of them."""
    grid, rows = sharded_state().values()
    boxes = {
        "grid": [
            (slice(0, 3), slice(0, 4)),
            (slice(0, 3), slice(4, 7)),
            (slice(3, 5), slice(0, 7)),
        ],
        "rows": [
            (slice(0, 1), slice(0, 3)),
            (slice(1, 4), slice(0, 3)),
            (slice(4, 4), slice(0, 3)),
        ],
    }
    path.mkdir()
    merged = None
    for rank in range(3):
        parts = {"grid": grid[boxes["grid"][rank]], "rows": rows[boxes["rows"][rank]]}
        save_dcp(path / "part", parts)
        metadata = read_metadata(path / "part")
        for index, info in metadata.storage_data.items():
            info.relative_path = f"__{rank}_0.distcp"
            corner = torch.Size([each.start for each in boxes[index.fqn][rank]])
            object.__setattr__(index, "offset", corner)
        (path / "part" / "__0_0.distcp").rename(path / f"__{rank}_0.distcp")
        shutil.rmtree(path / "part")
        merged = merged or metadata
        merged.storage_data = {
            MetadataIndex(index.fqn, index.offset): info
            for each in (merged, metadata)
            for index, info in each.storage_data.items()
        }
    for name, whole in sharded_state().items():
        merged.state_dict_metadata[name].size = whole.shape
        merged.state_dict_metadata[name].chunks = [
            ChunkStorageMetadata(
                torch.Size([each.start for each in box]),
                torch.Size([each.stop - each.start for each in box]),
            )
            for box in boxes[name]
        ]
    write_metadata(path, merged)


def read_metadata(path):
    return pickle.loads((path / ".metadata").read_bytes())


def write_metadata(path, metadata):
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
