"""Where the process's random generators stand: whether somebody drew."""

from __future__ import annotations

from manyhands import rng


def positions() -> dict[str, str]:
    """{torch, numpy, python: the generator's state}"""
    tensors, values = rng.capture()
    return {
        "torch": tensors["torch"].numpy().tobytes().hex(),
        "numpy": f"{values['numpy']} {tensors['numpy'].numpy().tobytes().hex()}",
        "python": str(values["python"]),
    }
