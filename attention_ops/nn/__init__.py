"""Modules: positions that rotate, that are added to inputs, and that are added to scores."""

from .positions import (
    AlibiBias,
    ClippedBias,
    DistanceBias,
    KerpleBias,
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositions,
    T5Bias,
    WindowBias,
)

__all__ = [
    "AlibiBias",
    "ClippedBias",
    "DistanceBias",
    "KerpleBias",
    "LearnedPositions",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "T5Bias",
    "WindowBias",
]
