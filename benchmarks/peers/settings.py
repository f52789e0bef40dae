"""What all training scripts agree on, and their arguments; no torch, since logs begin before it."""

from __future__ import annotations

import argparse
from pathlib import Path

WIDTHS = {"MLP, 26 k": 128, "MLP, 1 M": 960}
"""The width of the two hidden layers, by model."""
BATCH = 384
"""Samples of a step, over all ranks."""
MICRO_BATCHES = 8
SAVE_INTERVAL = 10
"""Steps between two checkpoints, for systems that need some."""
EPOCH = 1 << 23
"""Samples until ids repeat: more than a run needs."""


def parse_arguments() -> argparse.Namespace:
    """Read the arguments that all scripts have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True, help="Directory of the commit logs.")
    parser.add_argument("--model", choices=list(WIDTHS), default="MLP, 1 M")
    parser.add_argument("--steps", type=int, default=EPOCH // BATCH)
    parser.add_argument("--checkpoints", type=Path, help="Restore from here, and save here.")
    parser.add_argument("--digits", action="store_true", help="Train on scikit-learn's digits.")
    return parser.parse_args()
