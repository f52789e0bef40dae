"""Plain training steps: the gradient of the whole batch, whichever way gradients are kept."""

import torch

from phalanx.testing import over_groups

from .whole import assert_same_gradients, batch, mlp, share, wrapped

LOCAL_AND_SHM = {"backends": ("local", "shm"), "sizes": (1, 2, 4)}


@over_groups(backends=("local", "gloo", "shm"), sizes=(1, 2, 3, 4), split=True)
def test_gradients_are_those_of_the_whole_batch(group):
    ddp, whole = wrapped(mlp, group)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, whole)]
    for step in range(6):
        rows = batch(step, group.size())
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(share(rows, group)).square().mean().backward()
        whole(rows).square().mean().backward()
        assert_same_gradients(ddp.module, whole)
        for optimizer in optimizers:
            optimizer.step()
    ddp.assert_in_sync()
