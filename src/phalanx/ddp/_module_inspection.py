"""Parameters, buffers and special layers of a module, found in one walk.

torch's `named_parameters`, `named_buffers` and `named_modules` walk the module once each, which
takes longer than the rest of the construction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

NamedParameter = tuple[str, Parameter]


@dataclass(frozen=True)
class ModuleInventory:
    """The parameters of a module, and where its buffers are."""

    parameters: list[NamedParameter]
    """By name, each once, in the order of ``named_parameters``."""
    sparse: frozenset[str]
    """Those whose gradients are sparse, for their layer says so."""
    sync_norms: list[tuple[str, nn.SyncBatchNorm]]
    """The layers that normalise over all ranks, by name."""
    _places: list[tuple[str, nn.Module]]
    _tables: list[dict[str, Tensor | None]]
    """The buffers of each place, by name; empty for most."""
    _ignored: Collection[str]

    @classmethod
    def of(
        cls, module: nn.Module, ignored: Collection[str], more: Collection[NamedParameter] = ()
    ) -> ModuleInventory:
        """Look at a module, but for what is to be ignored, by name; and at `more` parameters."""
        found: dict[Parameter, str] = {}
        sparse, sync_norms, places = set(), [], []
        for prefix, part in _walk(module):
            places.append((prefix, part))
            for name, parameter in part._parameters.items():
                if parameter is not None and prefix + name not in ignored:
                    found.setdefault(parameter, prefix + name)
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                sparse.add(f"{prefix}weight")
            elif isinstance(part, nn.SyncBatchNorm):
                sync_norms.append((prefix.removesuffix("."), part))
        for name, parameter in more:
            found.setdefault(parameter, name)
        named = [(name, parameter) for parameter, name in found.items()]
        tables = [part._buffers for _, part in places]
        return cls(named, frozenset(sparse), sync_norms, places, tables, ignored)

    def buffers(self) -> list[Tensor]:
        """List the buffers that there are now, each once: a module may replace some."""
        if not any(self._tables):  # asked before every forward pass
            return []
        found = {
            id(buffer): _untracked(buffer) if _is_collecting(part) else buffer
            for (prefix, part), table in zip(self._places, self._tables, strict=True)
            for name, buffer in table.items()
            if buffer is not None and prefix + name not in self._ignored
        }
        return list(found.values())

    def named_buffers(self) -> dict[str, Tensor]:
        """Map names to the buffers that there are now, each once, under its first name.

        Autograd does not mind a write to what is returned, at whatever time it comes.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        for (prefix, _), table in zip(self._places, self._tables, strict=True):
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self._ignored:
                    found.setdefault(id(buffer), (prefix + name, _untracked(buffer)))
        return dict(found.values())


def _is_collecting(part: nn.Module) -> bool:
    """Tell whether a layer's buffers are statistics that it collects now, and does not use."""
    return part.training and isinstance(part, nn.modules.batchnorm._NormBase)


def _untracked(buffer: Tensor) -> Tensor:
    """Show a buffer so that autograd, which has saved it for nothing, does not mind a write.

    With several forward passes before a backward there is one in between.
    """
    return buffer.data


def _walk(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every module once, with the prefix of its names, in the order of ``named_modules``."""
    seen: set[nn.Module] = set()
    pending = [("", module)]
    while pending:
        prefix, part = pending.pop()
        if part in seen:
            continue
        seen.add(part)
        yield prefix, part
        children = [(f"{prefix}{name}.", child) for name, child in part._modules.items()]
        pending += [(name, child) for name, child in reversed(children) if child is not None]
