"""State of the wrapper: under the names that torch's class gives it, and without the group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn import Parameter

from ..errors import InvalidState, MisuseError
from ..join import _JoinConfig
from . import _arguments as arguments
from ._precision import Precision
from ._reducer import Reducer
from ._survey import Survey

__all__ = ["DataParallelState"]

PREFIX = "module."
LEFT_BEHIND = (
    "reducer",
    "process_group",
    "_channel",
    "_survey",
    "_precision",
    "device_mesh",
    "_join_config",
    "_join_block",
)


class DataParallelState(nn.Module):
    """What saving, loading, copying and pickling a wrapped module mean."""

    module: nn.Module
    reducer: Reducer
    parameters_to_ignore: set[str]
    _survey: Survey
    _precision: Precision | None
    _more: list[tuple[str, Parameter]]
    """Parameters besides the module's own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_load_state_dict_pre_hook(_accept_both)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_take_over)  # type: ignore[no-untyped-call]

    def _connect(self) -> None:
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, with ``module.`` before each name, as torch's class."""
        with nullcontext() if self._precision is None else self._precision.lifted():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with ``module.`` before each name, or with the module's own names."""
        if not _has_prefix(self.module, state_dict, ""):
            state_dict = _with_prefix(state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _take_over(self) -> None:
        """Reduce the gradients of the parameters that the module has now, if they are others."""
        survey = Survey.of(self.module, self.parameters_to_ignore, self._more)
        known = {id(parameter) for _, parameter in self._survey.parameters}
        if known != {id(parameter) for _, parameter in survey.parameters}:
            self._survey = survey
            self._reconnect()

    def _reconnect(self) -> None:
        """Make another reducer in the place of the one there is."""
        before = self.reducer
        before.close()
        self._connect()
        self.reducer.adopt(before)

    def __getstate__(self) -> dict[str, Any]:
        if self.reducer.optimizers:
            raise InvalidState(
                "a wrapped module is copied without its optimizers in backward: copy ddp.module, "
                "and wrap and register again"
            )
        state = {name: value for name, value in vars(self).items() if name not in LEFT_BEHIND}
        state["_synchronises"] = self.reducer.synchronises
        state["_weight"] = self.reducer.weights.current
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        synchronises, weight = state.pop("_synchronises"), state.pop("_weight")
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._join_config, self._join_block = _JoinConfig.construct_disabled_join_config(), None
        try:
            self.process_group = arguments.find_group()
        except MisuseError as error:
            raise InvalidState(
                "a wrapped module is copied or loaded without its group, and needs another: enter "
                "one first, with phalanx.groups.process_group(group)"
            ) from error
        self.device_mesh = None
        self._survey = Survey.of(self.module, self.parameters_to_ignore, self._more)
        self._connect()
        self.reducer.synchronises = synchronises
        self.reducer.weights.current = weight


def _take_over(wrapper: DataParallelState, _: Any) -> None:
    wrapper._take_over()


def _accept_both(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Have torch find the entries of a wrapper, if they have the names of the module itself."""
    module = getattr(wrapper, "module")  # noqa: B009 - nn.Module does not know its attributes
    own = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
    if _has_prefix(module, own, prefix):
        return
    for name in own:
        del state_dict[name]
    for name, value in own.items():
        state_dict[prefix + PREFIX + name.removeprefix(prefix)] = value


def _has_prefix(module: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether names in a state are those of the wrapper: ``module.`` comes before each.

    It may be the name of a part of the module, too. Then what fits better is meant.
    """
    names = [name.removeprefix(prefix) for name in state]
    if not all(name.startswith(PREFIX) for name in names):
        return False
    known = module.state_dict().keys()
    fitting = sum(name.removeprefix(PREFIX) in known for name in names)
    return fitting >= sum(name in known for name in names)


def _with_prefix(state: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``module.`` before each name, and before those of the modules whose version is told."""
    prefixed = OrderedDict((PREFIX + name, value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        prefixed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{PREFIX}{name}".removesuffix("."), value) for name, value in versions.items()
        )
    return prefixed
