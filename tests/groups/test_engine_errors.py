"""Classification of engine errors: a failed peer, or invalid arguments."""

import pytest
import torch.distributed as dist

from phalanx.errors import InvalidArgument

from .internals import EngineStopped, PeerDead, is_peer_failure

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:22194"
)


@pytest.mark.parametrize(
    "error",
    [
        PeerDead(3),
        EngineStopped(),
        dist.DistBackendError("NCCL communicator was aborted"),
        dist.DistNetworkError("failed to recv"),
        RuntimeError(CLOSED),
        RuntimeError("Application timeout caused pair closure"),
    ],
)
def test_connection_and_backend_errors_are_peer_failures(error):
    assert is_peer_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ProcessGroupGloo::allgather: invalid output tensor list at index 0"),
        RuntimeError("cannot repair this tensor"),
        RuntimeError("connection lost"),
        RuntimeError(f"while reading: {CLOSED}"),
        ValueError(CLOSED),
        InvalidArgument(CLOSED),
    ],
)
def test_argument_and_unrelated_errors_are_not_peer_failures(error):
    assert not is_peer_failure(error)
