"""Parameters, buffers and special layers of a module, found in one walk.

torch's `named_parameters`, `named_buffers` and `named_modules` walk the module once each, which
takes longer than the rest of the construction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.nn import Parameter

NamedParameter = tuple[str, Parameter]


class ModuleInventory:
    """The parameters and buffers of a module without the `ignored`, with the `extra` ones."""

    def __init__(
        self, module: nn.Module, ignored: Collection[str], extra: Collection[NamedParameter] = ()
    ) -> None:
        found: dict[Parameter, str] = {}
        sparse = set()
        self.sync_norms: list[tuple[str, nn.SyncBatchNorm]] = []
        self._ignored = ignored
        self._submodules: list[tuple[str, nn.Module]] = []
        for path, submodule in module.named_modules():
            prefix = path and f"{path}."
            self._submodules.append((prefix, submodule))
            for name, parameter in submodule._parameters.items():
                if parameter is not None and prefix + name not in ignored:
                    found.setdefault(parameter, prefix + name)
            if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
                sparse.add(f"{prefix}weight")
            elif isinstance(submodule, nn.SyncBatchNorm):
                self.sync_norms.append((path, submodule))
        for name, parameter in extra:
            found.setdefault(parameter, name)
        self.parameters = [(name, parameter) for parameter, name in found.items()]
        """Each once, in the order of ``named_parameters``."""
        self.sparse = frozenset(sparse)  # the names of embeddings with sparse gradients
        self._buffer_tables = [submodule._buffers for _, submodule in self._submodules]
        """The buffers of each submodule, by name; empty for most."""

    def buffers(self) -> list[Tensor]:
        """List the current buffers, each once. A module may replace buffers at any time.

        A batch norm in training updates its statistics but does not use them in backward, although
        autograd saves them. `.data` lets them be written to between forward and backward.
        """
        if not any(self._buffer_tables):  # a shortcut, as this is called before every forward
            return []
        found = {}
        for _, submodule, buffer in self._walk_buffers():
            is_norm = isinstance(submodule, nn.modules.batchnorm._NormBase)
            found[id(buffer)] = buffer.data if is_norm and submodule.training else buffer
        return list(found.values())

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the current buffers by their first name; writes are hidden from autograd."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, _, buffer in self._walk_buffers():
            found.setdefault(id(buffer), (name, buffer.data))
        return dict(found.values())

    def _walk_buffers(self) -> Iterator[tuple[str, nn.Module, Tensor]]:
        for (prefix, submodule), table in zip(self._submodules, self._buffer_tables, strict=True):
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self._ignored:
                    yield prefix + name, submodule, buffer
