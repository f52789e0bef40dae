"""One file per backend; `groups._backend_registry` names them."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UnknownOption

__all__ = ["refuse_options"]


def refuse_options(backend: str) -> Callable[[dict[str, object]], None]:
    """Make the check of a backend that has no options."""

    def refuse(options: dict[str, object]) -> None:
        if options:
            names = ", ".join(sorted(options))
            raise UnknownOption(f"{backend} takes no options, but was given {names}")

    return refuse
