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
    """The parameters of a module, and the places of its buffers.

    Leaves out the `ignored` names, and adds the `extra` parameters.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], extra: Collection[NamedParameter] = ()
    ) -> None:
        found: dict[Parameter, str] = {}
        sparse = set()
        self.sync_norms: list[tuple[str, nn.SyncBatchNorm]] = []
        self._ignored = ignored
        self._parts: list[tuple[str, nn.Module]] = []
        for path, part in module.named_modules():
            prefix = path and f"{path}."
            self._parts.append((prefix, part))
            for name, parameter in part._parameters.items():
                if parameter is not None and prefix + name not in ignored:
                    found.setdefault(parameter, prefix + name)
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                sparse.add(f"{prefix}weight")
            elif isinstance(part, nn.SyncBatchNorm):
                self.sync_norms.append((path, part))
        for name, parameter in extra:
            found.setdefault(parameter, name)
        self.parameters = [(name, parameter) for parameter, name in found.items()]
        """Each once, in the order of ``named_parameters``."""
        self.sparse = frozenset(sparse)
        """The names of embeddings with sparse gradients."""
        self._buffer_tables = [part._buffers for _, part in self._parts]
        """The buffers of each part, by name; empty for most."""

    def buffers(self) -> list[Tensor]:
        """List the current buffers, each once. A module may replace buffers at any time.

        A batch norm in training updates its statistics but does not use them in backward, although
        autograd saves them. `.data` lets them be written to between forward and backward.
        """
        if not any(self._buffer_tables):  # a shortcut, as this is called before every forward
            return []
        found = {}
        for _, part, buffer in self._walk_buffers():
            is_training_norm = part.training and isinstance(part, nn.modules.batchnorm._NormBase)
            found[id(buffer)] = buffer.data if is_training_norm else buffer
        return list(found.values())

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the current buffers by their first name; writes are hidden from autograd."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, _, buffer in self._walk_buffers():
            found.setdefault(id(buffer), (name, buffer.data))
        return dict(found.values())

    def _walk_buffers(self) -> Iterator[tuple[str, nn.Module, Tensor]]:
        for (prefix, part), table in zip(self._parts, self._buffer_tables, strict=True):
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self._ignored:
                    yield prefix + name, part, buffer
