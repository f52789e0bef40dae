"""Load examples as modules, so that pooled ranks run them without new interpreters."""

import importlib.util
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load(name, ctx, *, backend=None):
    """Load an example whose new_group() uses the ranks of the pool."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.new_group = partial(ctx.group, backend)
    return example
