"""Problems of a reader's own, for the tests: each function returns (model, loss, data), or fails to."""

from __future__ import annotations

import torch
from torch import nn


class Point(nn.Module):
    """One parameter w; the loss is the mean of (w - x)^2 / 2 over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w - x


def half_mean_square(error: torch.Tensor) -> torch.Tensor:
    return (error * error).mean() / 2


def point():
    return Point().double(), half_mean_square, torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)


def classes():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(60, 4)
    return model, nn.functional.cross_entropy, (x, x[:, :3].argmax(1))


def two_values():
    return Point(), half_mean_square


def no_model():
    return "model", half_mean_square, torch.ones(3)


def no_loss():
    return Point(), 1.0, torch.ones(3)


def no_parameters():
    return nn.ReLU(), half_mean_square, torch.ones(3)


def no_data():
    return Point(), half_mean_square, [1, 2, 3]


def fails():
    raise FileNotFoundError("data.csv")


not_a_function = 3


class Slopes(nn.Module):
    """Many copies of x / 4 on a line: the slope that a step sees of each is 4 with probability 1/4, else -1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(400))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.x * torch.where(torch.rand(self.x.shape) < 0.25, 4.0, -1.0)


def slopes():
    return Slopes(), torch.sum, torch.ones(1)


class Crease(nn.Module):
    """|x1 + x2| / 2 + |x1 - x2|, started at (1.505, 0.5)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.505, 0.5], dtype=torch.float64))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return (self.x[0] + self.x[1]).abs() / 2 + (self.x[0] - self.x[1]).abs()


def crease():
    return Crease(), torch.sum, torch.ones(1, dtype=torch.float64)
