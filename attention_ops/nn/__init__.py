"""Modules: positions that rotate, that are added to inputs, and that are added to scores."""

from .positions import (
    AlibiBias,
    ClippedBias,
    DistanceBias,
    KerpleBias,
    LearnedPositions,
    RotaryEmbedding,
    ShawPositions,
    SinusoidalPositions,
    T5Bias,
    TransformerXLPositions,
    WindowBias,
)

__all__ = [
    "AlibiBias",
    "ClippedBias",
    "DistanceBias",
    "KerpleBias",
    "LearnedPositions",
    "RotaryEmbedding",
    "ShawPositions",
    "SinusoidalPositions",
    "T5Bias",
    "TransformerXLPositions",
    "WindowBias",
]
