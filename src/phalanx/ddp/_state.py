"""State of the wrapper: under the names that torch's class gives it, and without the group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
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
        renamed = _plain_names(self, state_dict)
        if renamed:
            state_dict = _with_prefix(state_dict, renamed)
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
                "cannot copy or pickle a wrapped module that has optimizers in backward. Copy "
                "ddp.module, wrap it and register the optimizers again"
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
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    renamed = _plain_names(wrapper, names)
    values = {name: state_dict.pop(prefix + name) for name in renamed}
    for name, value in values.items():
        state_dict[prefix + PREFIX + name] = value


def _plain_names(wrapper: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of a state that lack the ``module.`` of the wrapper; none if it is its own.

    A part of the module may be called ``module`` too, and any state may have further entries, so
    what counts is how many names are known either way.
    """
    names = set(names)
    plain = set(wrapper.get_submodule("module").state_dict())
    own = _names_beside_module(wrapper) | {PREFIX + name for name in plain}
    as_own, as_plain = len(names & own), len(names & plain)
    if as_plain <= as_own and (as_own or any(name.startswith(PREFIX) for name in names)):
        return set()
    # A part of the module may know names that it has no longer, so unknown ones go there too.
    others = {name for name in names - own if not name.startswith(PREFIX)}
    lacking = names & plain | others
    return {name for name in lacking if PREFIX + name not in names or PREFIX + name in lacking}


def _names_beside_module(wrapper: nn.Module) -> set[str]:
    """Return the names in its state of what a subclass has registered on the wrapper itself."""
    state: dict[str, Any] = {}
    wrapper._save_to_state_dict(state, "", keep_vars=True)
    for name, child in wrapper.named_children():
        if name != "module":
            child.state_dict(destination=state, prefix=f"{name}.")
    return set(state)


def _with_prefix(state: Mapping[str, Any], renamed: set[str]) -> dict[str, Any]:
    """Put ``module.`` before names, and before those of the modules whose version is told."""
    prefixed = OrderedDict(
        (PREFIX + name if name in renamed else name, value) for name, value in state.items()
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        prefixed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{PREFIX}{name}".removesuffix("."), value) for name, value in versions.items()
        )
    return prefixed
