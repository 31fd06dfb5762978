"""What engine `sim` says of slow_links.py's strategies: this machine's compute as `manyhands calibrate` measures it, on described links."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from slow_links_workers import Job, Model, task

import manyhands as mh
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput
from manyhands.recording.history import PARTS

PAYLOAD = 1448 / 1514  # of a full Ethernet frame, as `tc` counts it: what headers (Ethernet, IP, TCP) leave of a card


def predictions(model: Model, jobs: list[Job], workers: int, bits_per_s: float) -> list[dict[str, Any]]:
    """By job: (virtual) seconds of every step."""
    begun = time.monotonic()
    profile = mh.calibrate(
        task(model, test_data=None), workers=workers, strategies=(), quick=True, threads_per_worker=1
    )
    print(f"  calibrated in {time.monotonic() - begun:.0f} s: compute {profile.compute}", flush=True)
    network = replace(profile.network, workers_per_host=1, bandwidth=bits_per_s * PAYLOAD)
    return [{"name": job.name, **_predicted(model, job, workers, profile, network)} for job in jobs]


def _predicted(model: Model, job: Job, workers: int, profile: Profile, network: SimNetworkSpec) -> dict[str, Any]:
    begun, engine = time.monotonic(), Sim(network=network, compute=profile.compute)
    try:
        run = mh.train(
            task(model, max_steps=job.steps, test_data=None), strategy=job.spec, engine=engine, workers=workers
        )
    except BadInput as refusal:
        return {"refused": str(refusal)}
    seconds = [sum(row[f"{part}_s"] for part in PARTS) for row in run.history]
    mean = sum(seconds) / len(seconds)
    print(
        f"  {job.name:<42} {job.steps:>4} steps  {time.monotonic() - begun:6.1f} s  {mean:.3f} virtual s a step",
        flush=True,
    )
    return {"seconds": seconds}
