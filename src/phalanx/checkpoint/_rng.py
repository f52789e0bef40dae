"""`RNGState`: the state of the global random number generators, as part of a checkpoint."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RNGState:
    """The global random number generators of torch, Python, and numpy if it is imported.

    Put one into the state to save and into the state to load::

        state = {"model": model, "optimizer": optimizer, "rng": RNGState()}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors and numbers."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        }
        if (accelerator := _accelerator()) is not None:
            name, module = accelerator
            state["accelerator"] = {name: module.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy as np

            name, words, position, has_gauss, gauss = np.random.get_state()
            state["numpy"] = {
                "generator": name,
                "words": torch.tensor([int(word) for word in words]),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators. States of devices that do not exist here are ignored."""
        before = self.state_dict()
        try:
            self._set(state_dict)
        except BaseException:
            self._set(before)  # all of them, or none
            raise

    def _set(self, state_dict: dict[str, Any]) -> None:
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"].cpu())
        if (accelerator := _accelerator()) is not None:
            name, module = accelerator
            if name in state_dict.get("accelerator", {}):
                module.set_rng_state(state_dict["accelerator"][name].cpu())
        if "numpy" in state_dict:
            import numpy as np

            state = state_dict["numpy"]
            words = np.array(state["words"].tolist(), dtype=np.uint32)
            gauss = (state["has_gauss"], state["gauss"])
            np.random.set_state((state["generator"], words, state["position"], *gauss))


def _accelerator() -> tuple[str, Any] | None:
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return None
    return device.type, torch.get_device_module(device)
