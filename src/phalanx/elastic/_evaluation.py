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

from ..ddp._summation_tree import add_in_order, tree_order
from ..errors import InvalidState, InvalidType
from ._loader import ElasticLoader
from ._randomness import preserved_generators

_SINGLE = ""  # the name of a result that is not in a dict


class Evaluation:
    """The results of a function for the batches of a dataset, as far as this rank knows them."""

    def __init__(self, model: nn.Module, fn: Callable[[Any], Any], loader: Any) -> None:
        if not callable(fn) or not isinstance(loader, ElasticLoader):
            got = f"{type(fn).__name__} and {type(loader).__name__}"
            raise InvalidType(f"evaluate takes a function and a loader of run.loader(), got {got}")
        self.batches = loader._evaluation_batches()
        self._model, self._fn, self._loader = model, fn, loader
        self._rows: dict[int, Any] = {}  # the number of samples and the results of each batch

    def run(self, lo: int, hi: int) -> None:
        """Evaluate the batches ``range(lo, hi)``."""
        with torch.no_grad(), _evaluation_mode(self._model), preserved_generators():
            for number, samples, batch in self._loader._evaluation_iterator(lo, hi):
                self._rows[number] = [samples, _to_lists(self._fn(batch))]

    def to_text(self) -> str:
        """Return the results for other ranks. Numbers in JSON are exact."""
        return json.dumps(list(self._rows.items()))

    def add(self, text: str) -> None:
        """Add the results of another rank."""
        self._rows.update(dict(json.loads(text)))

    def missing(self) -> list[int]:
        """Return the batches without a result."""
        return [number for number in range(self.batches) if number not in self._rows]

    def result(self) -> Any:
        """Return the mean over all samples; see `ElasticRun.evaluate`."""
        everything = [self._rows[number] for number in range(self.batches)]
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
