"""How competitors look in pictures, and how axes are written."""

from __future__ import annotations

from dataclasses import dataclass

from .table import seconds

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "SKY", "Style", "round_time"]

# Okabe and Ito's colours, which those who are colour-blind can tell apart; markers for print.
ORANGE, GREEN, SKY, BLUE, GREY = "#D55E00", "#009E73", "#56B4E9", "#0072B2", "#666666"
BLACK = "#000000"


@dataclass(frozen=True)
class Style:
    """How a competitor is drawn."""

    label: str
    colour: str
    marker: str
    dash: str = "-"


def round_time(value: float) -> str:
    """Write a time that is a round number: ``20 ms``."""
    number, unit = seconds(value * 1.0000001).split()  # so that 1e-6 is not 1000 ns
    return f"{float(number):g} {unit}"
