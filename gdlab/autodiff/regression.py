"""A neuron that is fitted to six points: as torch trains it, and as an expression for the tape."""

from __future__ import annotations

from typing import Any

POINTS = ((-2.0, -0.9), (-1.2, -0.7), (-0.4, 0.1), (0.4, 0.5), (1.2, 0.9), (2.0, 1.0))
LOSS = f"({' + '.join(f'(tanh(w*{x} + b) - {y})**2' for x, y in POINTS)}) / {len(POINTS)}"
"""The mean of (tanh(w x + b) - y)^2 over the points, in the grammar of expressions."""


def neuron() -> Any:
    """Return (model, loss, data) for gd.Torch: a linear layer of one weight and one bias, then tanh."""
    import torch

    x, y = torch.tensor(POINTS, dtype=torch.float64).unsqueeze(-1).unbind(1)
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh()).double(), torch.nn.functional.mse_loss, (x, y)
