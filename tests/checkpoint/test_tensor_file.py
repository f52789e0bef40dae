"""Tensor files: bitwise round trips in the safetensors format."""

import re
import weakref

import pytest
import safetensors.torch
import torch

from .internals import (
    ProgressMeter,
    TensorShard,
    _tensor_file,
    nbytes,
    safetensors_type,
    tensor_memory,
    write_tensor_file,
)
from .states import load, same, same_tensor, saved

DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        # Without sub-byte dtypes, which have no tensors, and quantized ones.
        if isinstance(value, torch.dtype) and not re.search(r"int[1-7]$|^q|^bits", name)
    },
    key=str,
)


def of_dtype(dtype, count=6):
    """Return a tensor of the dtype with varied bits."""
    size = count * dtype.itemsize
    bits = torch.arange(size, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    if dtype is torch.bool:
        return (bits % 2).to(torch.bool)
    return bits.view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bitwise(tmp_path, dtype):
    tensor = of_dtype(dtype)
    state = {"flat": tensor, "two": tensor.reshape(2, 3), "none": tensor[:0], "one": tensor[0]}
    saved(tmp_path / "c", [state])
    loaded, missing = load(tmp_path / "c")
    assert missing == []
    assert same(state, loaded)


def test_strided_conjugate_and_empty_tensors_round_trip(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    complicated = torch.randn(3, dtype=torch.complex64)
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 3),
        "conjugate": complicated.conj(),
        "negative": complicated.conj().imag,
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    saved(tmp_path / "c", [state])
    assert same(state, load(tmp_path / "c")[0])


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    weight = torch.randn(1000)
    saved(tmp_path / "c", [{"a": weight, "b": {"c": weight}, "view": weight[:10]}])
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert file.stat().st_size < 4100 + 1000
    loaded, _ = load(tmp_path / "c")
    assert loaded["a"] is loaded["b"]["c"]
    assert torch.equal(loaded["view"], weight[:10])


def test_safetensors_library_reads_our_files(tmp_path):
    state = {
        str(dtype): of_dtype(dtype) for dtype in DTYPES if safetensors_type(dtype, ())[0] != "U8"
    }
    state.update(
        {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5),
            "__metadata__": torch.ones(2),
            "q\"u'o\\té": torch.ones(1),
        }
    )
    saved(tmp_path / "c", [state])
    (file,) = (tmp_path / "c").glob("*.safetensors")
    opened = safetensors.torch.load_file(file)
    assert len(opened) == len(state)
    for name, tensor in state.items():
        key = '"__metadata__"' if name == "__metadata__" else name
        wanted = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert same_tensor(opened[key], wanted), name


def test_safetensors_library_reads_shards(tmp_path, monkeypatch):
    from phalanx.checkpoint import _replication

    monkeypatch.setattr(_replication.divide_among_ranks, "__kwdefaults__", {"grain": 16, "cut": 16})
    weight = torch.randn(100, 7)
    saved(tmp_path / "c", [{"w": weight}] * 3)
    found = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    pieces = sorted(found.items(), key=lambda item: int(item[0].split("~")[1].split(":")[0]))
    assert len(pieces) == 3
    assert torch.equal(torch.cat([piece for _, piece in pieces]), weight.reshape(-1))
    assert torch.equal(load(tmp_path / "c")[0]["w"], weight)


class Recorder:
    def __init__(self):
        self.data = b""
        self.addresses = []

    def write(self, data):
        self.data += bytes(data)
        if data.nbytes:
            self.addresses.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tensors_are_written_without_a_copy(monkeypatch):
    monkeypatch.setattr(_tensor_file, "CHUNK_BYTES", 100)
    tensor = torch.randn(10, 10)
    sink = Recorder()
    share = TensorShard("w", tensor.dtype, (10, 10), 0, 400, tensor)
    written = write_tensor_file(sink, [share], ProgressMeter())
    assert sink.addresses[1:] == [tensor.data_ptr() + 100 * i for i in range(4)]
    assert len(sink.data) == written.length
    assert written.header_length % 64 == 0


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tensors_are_aligned_to_their_item_size():
    sink = Recorder()
    tensors = [torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.float64, torch.int16)]
    shares = [
        TensorShard(str(t.dtype), t.dtype, (3,), 0, nbytes(t.dtype, (3,)), t) for t in tensors
    ]
    for share, place in zip(
        shares, write_tensor_file(sink, shares, ProgressMeter()).shards, strict=True
    ):
        assert place.begin % share.dtype.itemsize == 0


def test_tensor_memory_is_not_a_copy():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    tensor_memory(tensor)[1] = 0x3F
    assert tensor[0] != 0
    assert len(tensor_memory(torch.empty(0))) == 0


def test_tensor_memory_keeps_its_tensor_alive():
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    view = tensor_memory(tensor)[8:]
    del tensor
    assert alive() is not None
    view.release()
    del view
    assert alive() is None
