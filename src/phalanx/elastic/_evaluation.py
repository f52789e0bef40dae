"""Evaluation on all ranks, with the same bits at any number of them.

The batches of a dataset are divided among the ranks. Every rank sends what its batches gave, and
all ranks add everything up in the order of the tree over batch numbers.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ddp._communicator import Communicator
from ..ddp._summation_tree import LeafBlock, add_in_order, tree_order
from ..errors import InvalidState, InvalidType
from ._loader import ElasticLoader
from ._randomness import preserved_generators

_SINGLE = ""  # the name of a result that is not in a dict


def evaluate(model: nn.Module, comm: Communicator, fn: Callable[[Any], Any], loader: Any) -> Any:
    """Return the mean of `fn` over all samples; see `ElasticRun.evaluate`."""
    if not callable(fn) or not isinstance(loader, ElasticLoader):
        got = f"{type(fn).__name__} and {type(loader).__name__}"
        raise InvalidType(f"evaluate takes a function and a loader of run.loader(), got {got}")
    block = LeafBlock.of_rank(comm.rank, comm.size, loader._evaluation_batches())
    rows: list[Any] = []
    with torch.no_grad(), _evaluation_mode(model), preserved_generators():
        for _, samples, batch in loader._evaluation_iterator(block.lo, block.hi):
            rows.append([samples, _to_lists(fn(batch))])
    # Numbers in JSON are exact.
    texts = comm.exchange(json.dumps(rows)) if comm.size > 1 else [json.dumps(rows)]
    everything = [row for text in texts for row in json.loads(text)]
    names = list(everything[0][1])
    if any(list(values) != names for _, values in everything):
        raise InvalidState("fn must return the same names for every batch")
    total = sum(samples for samples, _ in everything)
    results = {
        name: _mean([(samples, values[name]) for samples, values in everything], total)
        for name in names
    }
    return results[_SINGLE] if names == [_SINGLE] else results


def _mean(pairs: list[tuple[int, Any]], total: int) -> float | Tensor:
    terms = [samples * torch.tensor(value, dtype=torch.float64) for samples, value in pairs]
    shapes = {tuple(term.shape) for term in terms}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise InvalidState(
            f"fn must return the mean over a batch, in the same shape for every batch; got {listed}"
        )
    mean = add_in_order(terms, tree_order(len(terms)), torch.add) / total
    return mean if mean.ndim else float(mean)


def _to_lists(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        return {_SINGLE: _to_list(result)}
    if _SINGLE in result or not all(isinstance(name, str) for name in result):
        raise InvalidType("names of results must be strings that are not empty")
    return {name: _to_list(value) for name, value in result.items()}


def _to_list(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).tolist()
    if isinstance(value, numbers.Real):  # NumPy's numbers are, too
        return float(value)
    kind = type(value).__name__
    raise InvalidType(f"fn must return numbers, tensors or a dict of them, got {kind}")


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
