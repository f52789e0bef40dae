"""The backends, one module each; `groups._backend_registry` registers them."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UnknownOption


def refuse_options(backend: str) -> Callable[[dict[str, object]], None]:
    """Return the options check of a backend without options."""

    def refuse(options: dict[str, object]) -> None:
        if options:
            names = ", ".join(sorted(options))
            raise UnknownOption(f"{backend} has no options, got {names}")

    return refuse
