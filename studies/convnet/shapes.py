"""Generates the pictures: one of five shapes, with lying or standing stripes. Ten classes.

Position, size, rotation, colours, background, the stripes' width, phase and tilt, two plain distractors and noise do
not depend on the class. A mirror changes neither shape nor stripes, so flips keep the class.
"""

from __future__ import annotations

import numpy as np

SHAPES = ("disc", "ring", "square", "triangle", "cross")
STRIPES = ("lying", "standing")
CLASSES = len(SHAPES) * len(STRIPES)


def pictures(count: int, size: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [count, 3, size, size] uint8 and y [count] int64: 2 * shape + stripes, classes as even as possible."""
    random = np.random.default_rng(seed)
    y = random.permutation(np.arange(count) % CLASSES)
    centres = (np.arange(size) + 0.5) / size * 2 - 1
    down, right = np.meshgrid(centres, centres, indexing="ij")
    return np.stack([_picture(random, down, right, int(label), noise) for label in y]), y


def _picture(random: np.random.Generator, down: np.ndarray, right: np.ndarray, label: int, noise: float) -> np.ndarray:
    """Returns one picture [3, size, size] uint8; `down` and `right` [size, size] are pixel positions in [-1, 1]."""
    slope = random.uniform(-0.2, 0.2, (3, 2))
    canvas = random.uniform(0.2, 0.8, (3, 1, 1)) + slope[:, :1, None] * down + slope[:, 1:, None] * right
    for _ in range(2):
        centre, half = random.uniform(-0.9, 0.9, 2), random.uniform(0.12, 0.3, 2)
        plain = (abs(down - centre[0]) < half[0]) & (abs(right - centre[1]) < half[1])
        canvas = np.where(plain, random.uniform(0, 1, (3, 1, 1)), canvas)
    shape, stripes = divmod(label, len(STRIPES))
    centre, radius = random.uniform(-0.25, 0.25, 2), random.uniform(0.6, 0.9)
    inside = _inside(
        shape, *_turned(random.uniform(-0.4, 0.4), (down - centre[0]) / radius, (right - centre[1]) / radius)
    )
    along, _ = _turned(random.uniform(-0.3, 0.3), *((down, right) if stripes == 0 else (right, down)))
    wave = np.sin(np.pi * random.uniform(3.0, 5.0) * along + random.uniform(0, 2 * np.pi))
    light, dark = random.uniform(0.6, 1.0, (3, 1, 1)), random.uniform(0.0, 0.4, (3, 1, 1))
    canvas = np.where(inside, np.where(wave > 0, light, dark), canvas)
    canvas = canvas + noise * random.standard_normal(canvas.shape)
    return (canvas.clip(0, 1) * 255).round().astype(np.uint8)


def _turned(angle: float, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.cos(angle) * a - np.sin(angle) * b, np.sin(angle) * a + np.cos(angle) * b


def _inside(shape: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns which of the points (a, b), in radii from its centre, lie in the shape: [size, size] bool."""
    distance = np.hypot(a, b)
    return [
        distance < 0.9,
        (distance < 1.0) & (distance > 0.5),
        np.maximum(abs(a), abs(b)) < 0.8,
        (a < 0.6) & (abs(b) < (a + 1.1) * 0.6),  # an equilateral triangle up to 4 %
        (np.minimum(abs(a), abs(b)) < 0.3) & (np.maximum(abs(a), abs(b)) < 1.0),
    ][shape]
