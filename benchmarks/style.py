"""How competitors look in pictures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "SKY", "Style"]

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
