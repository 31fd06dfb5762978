"""Colours that people who see colours differently tell apart, and that stand out from the page."""

import itertools

import numpy as np

from manyhands.evidence.compare import drawing

PAGES = ("#ffffff", "#14171b")  # of report.html.jinja
APART = 14.0  # CIE76; 2.3 is just noticeable
CONTRAST = 2.6  # of a line with the page

# What is left of linear RGB for people without one kind of cones: G. M. Machado, M. M. Oliveira and L. A. F. Fernandes,
# "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, table 1, severity 1.
NO_RED = [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998]
NO_GREEN = [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881]
NO_BLUE = [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900]
VISIONS = [np.eye(3), *(np.reshape(left, (3, 3)) for left in (NO_RED, NO_GREEN, NO_BLUE))]
XYZ = np.reshape(
    [0.4124564, 0.3575761, 0.1804375, 0.2126729, 0.7151522, 0.0721750, 0.0193339, 0.119192, 0.9503041], (3, 3)
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str) -> np.ndarray:
    """sRGB `#rrggbb` as linear [3]."""
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_any_two_colours_are_told_apart_and_stand_out_from_the_page() -> None:
    palettes = (drawing.INK, *drawing.HUES), tuple(drawing.PART_HUES.values())
    for colours, page, vision in itertools.product(palettes, (0, 1), VISIONS):
        for one, other in itertools.combinations([pair[page] for pair in colours], 2):
            seen = [lab(vision @ linear(colour)) for colour in (one, other)]
            assert np.linalg.norm(seen[0] - seen[1]) > APART, (one, other, vision)
    for page, pair in itertools.product((0, 1), (drawing.MUTED, *itertools.chain(*palettes))):
        bright, dark = sorted((float(XYZ[1] @ linear(colour)) for colour in (pair[page], PAGES[page])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) > CONTRAST, pair[page]
