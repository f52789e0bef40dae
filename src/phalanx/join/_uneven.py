"""A loop over data of which ranks have different amounts, without a block around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ..errors import InvalidArgument, InvalidType
from ._join import Join
from ._report import JoinReport

__all__ = ["Uneven", "uneven"]

T = TypeVar("T")


def uneven(
    loader: Iterable[T],
    *joinables: Joinable,
    optimizers: Iterable[Optimizer] = (),
    **kwargs: Any,
) -> Uneven[T]:
    """Iterate over this rank's batches, however many the others have.

    ::

        for batch in phalanx.uneven(loader, ddp, optimizers=[optimizer]):
            ...

    Each turn is a step: whatever collectives are in it go on among the ranks that have data. A rank
    whose data are over waits at the end of the loop until everybody's are; so does one that leaves
    it with ``break``. `kwargs` are those of `Join`.
    """
    return Uneven(loader, joinables, optimizers, kwargs)


class Uneven(Generic[T]):
    """A loader whose end need not come at the same step on every rank."""

    def __init__(
        self,
        loader: Iterable[T],
        joinables: Iterable[Joinable],
        optimizers: Iterable[Optimizer],
        kwargs: dict[str, Any],
    ) -> None:
        if isinstance(loader, Joinable):
            raise InvalidType("uneven takes the loader first, and then what is trained with it")
        self._loader = loader
        self._joinables = tuple(joinables)
        if not self._joinables:
            raise InvalidArgument("uneven has to know what is trained: uneven(loader, ddp)")
        self._optimizers = tuple(optimizers)
        self._kwargs = kwargs
        self._report: JoinReport | None = None
        self._missed: Exception | None = None
        """What was raised at the end of a loop that was left early, where Python drops it."""

    @property
    def report(self) -> JoinReport | None:
        """What happened in the last loop, when that is over; raises if its end went wrong."""
        self._raise_missed()
        return self._report

    def __iter__(self) -> Iterator[T]:
        self._raise_missed()
        join = Join(self._joinables, optimizers=self._optimizers, **self._kwargs)
        try:
            with join:
                for batch in self._loader:
                    if join.leaves:
                        join.drive()
                    yield batch
        except Exception as error:
            if isinstance(error.__context__, GeneratorExit):
                self._missed = error
            raise
        finally:
            self._report = join.report

    def _raise_missed(self) -> None:
        missed, self._missed = self._missed, None
        if missed is not None:
            raise missed

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise InvalidType(f"a {type(self._loader).__name__} has no length")
        return len(self._loader)
