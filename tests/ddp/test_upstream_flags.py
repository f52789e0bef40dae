"""torch's DDP flags are accepted but not needed."""

import warnings

import pytest
from torch import nn

from phalanx.ddp import DDP
from phalanx.testing import over_groups

from .whole import TINY, everywhere, mlp, squares, train


class Optional(nn.Module):
    """Two layers, one of them optional."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, rows, both=True):
        return self.always(self.sometimes(rows) if both else rows)


FLAGS = ["find_unused_parameters", "static_graph", "skip_all_reduce_unused_params",
         "batched_grad_copy"]  # fmt: skip


@everywhere
@pytest.mark.parametrize("value", [True, False])
def test_flags_do_not_change_results(group, value):
    ddp, _ = train(mlp, group, squares, **dict.fromkeys(FLAGS, value))
    assert all(getattr(ddp, flag) is value for flag in FLAGS)


@everywhere
@pytest.mark.filterwarnings("ignore:the graph of this backward pass")  # static_graph, see below
@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_unused_parameters_work_with_and_without_flags(group, flag):
    def loss(module, rows, step, rank):
        return module(rows, both=(step + rank) % 3 == 0).square().mean()

    train(Optional, group, loss, steps=6, bucket_cap_mb=TINY, **({flag: True} if flag else {}))


processes = over_groups(backends=("shm",), sizes=(1, 2, 4), reuse=True)
"""Processes only: threads share the warnings registry."""


@processes
def test_changed_static_graph_warns(group):
    def told(last):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp, _ = train(
                Optional,
                group,
                lambda module, rows, step, _: module(rows, both=step != last).square().mean(),
                steps=6,
                bucket_cap_mb=TINY,
                static_graph=True,
            )
        data = ddp._get_ddp_logging_data()
        return [str(w.message) for w in caught], data["can_set_static_graph"]

    assert told(last=None) == ([], True)
    (message,), could = told(last=5)
    assert "static_graph" in message
    assert not could


@everywhere
@pytest.mark.filterwarnings("ignore:the graph of this backward pass")
def test_changed_static_graph_still_gives_correct_gradients(group):
    def loss(module, rows, step, rank):
        return module(rows, both=step not in (3, 4)).square().mean()

    ddp, _ = train(Optional, group, loss, steps=6, bucket_cap_mb=TINY, static_graph=True)
    assert ddp.reducer.graph_ever_changed


@processes
def test_check_reduction_is_deprecated_and_does_nothing(group):
    with pytest.warns(FutureWarning, match="check_reduction"):
        DDP(mlp(), process_group=group, check_reduction=True)
