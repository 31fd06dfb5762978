import json
import math
from pathlib import Path
from typing import Any

import pytest

from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.compute import Coding, Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput
from refusals import refused

LOCAL = {"latency": 1 / 3 * 1e-4, "bandwidth": 7.1e9, "workers_per_host": 1 << 40, "local_latency": 1e-6 / 7}
CODECS = {"onebit": Coding(1e-9 / 3, 1e-9 / 7), "threshold": Coding(1e-9, 0.0, 1e-8 / 3, 1e-8 / 7)}
COMPUTE = {"row": 0.1 / 3, "step": 1e-3 / 7, "jitter": "quantiles:0.9/1/1.7", "lease": 1e-4, "merge": 1e-10}
PROFILE = Profile(
    networks={
        "local": SimNetworkSpec(**LOCAL, local_bandwidth=math.inf),  # type: ignore[arg-type]
        "sockets": SimNetworkSpec.parse("lan,host0=bandwidth:1e8"),
    },
    compute=Compute(**COMPUTE, codecs=CODECS),  # type: ignore[arg-type]
    task="chars:width=64",
    workers=2,
    batch_sizes=(8, 32),
    measured="2026-02-01T12:00:00+00:00",
    machine={"torch": "2.13.0", "cores": "2"},
    errors={"allreduce": -0.031, "local-sgd:period=8": 0.1},
)


def least(**changes: Any) -> Profile:
    """What must be said."""
    common = {"networks": {"local": SimNetworkSpec()}, "compute": Compute(), "task": "digits", "workers": 1}
    return Profile(**{**common, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_what_was_saved_is_loaded_exactly(path: Path) -> None:
    assert Profile.load(path) == PROFILE
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]
    output = json.loads(path.read_text())  # a person can read it
    assert (output["kind"], output["schema"]) == ("manyhands profile", 1)
    assert output["networks"]["sockets"] == str(SimNetworkSpec.parse("lan,host0=bandwidth:1e8"))
    path.write_text(json.dumps(output | {"compute": "row=0.1,lease=1e-4"}))  # as before codecs took time
    assert (Profile.load(path).compute.row, Profile.load(path).compute.codecs) == (0.1, {})
    least().save(path)
    assert Profile.load(path) == least()
    assert least().network == SimNetworkSpec()


def test_an_engine_reads_it_once_and_goes_by_what_it_read(path: Path) -> None:
    engine = Sim(profile=path)
    path.unlink()
    assert engine.launch(lambda worker: worker.size, LaunchSpec(workers=2)) == [2, 2]
    assert engine.parts[:2] == (PROFILE.network, PROFILE.compute)
    assert engine.on_one_host(2)


NO_PROFILE = {  # what the file has in it, or the changes of it
    b"": "is not JSON.*write it again with",
    b"\xff\xfe": "is not JSON",
    b"[]": "is not a profile of manyhands",
    b"{}": "is not a profile of manyhands",
    b'{"kind": "other"}': "is not a profile of manyhands",
}
DAMAGED: list[tuple[dict[str, Any], str]] = [
    *(({"schema": schema}, f"has schema {schema!r}, and this version reads 1") for schema in (2, "1", None)),
    ({"compute": None, "extra": 1}, "lacks compute, has extra, which is unknown"),
    ({"compute": "row=fast"}, "is damaged: compute: row must be a time"),
    ({"networks": {"local": "speed=1"}}, "is damaged: network has no option 'speed'"),
    ({"networks": {"sockets": "lan"}}, "is damaged: a profile must have a network 'local'"),
    ({"networks": "lan"}, "is damaged: networks has the wrong type"),
    ({"workers": "two"}, 'is damaged: workers has the wrong type: "two"'),
    ({"workers": 0}, "is damaged: a profile must be of at least 1 worker; got 0"),
    ({"batch_sizes": [1.5]}, "is damaged: batch_sizes has the wrong type"),
    ({"errors": {"allreduce": "small"}}, "is damaged: errors has the wrong type"),
]


def test_what_is_no_profile(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone.json cannot be read \(No such file.*manyhands calibrate TASK"):
        Profile.load(tmp_path / "gone.json")
    whole = path.read_bytes()
    contents = {**NO_PROFILE, whole[:-20]: "is not JSON"}
    for changes, words in DAMAGED:
        values = {name: value for name, value in (json.loads(whole) | changes).items() if value is not None}
        contents[json.dumps(values).encode()] = words
    for content, words in contents.items():
        path.write_bytes(content)
        refused(words, Profile.load, path, case=content)


def test_what_no_profile_may_say() -> None:
    with pytest.raises(BadInput, match="prediction error of allreduce must be a finite number; got nan"):
        least(errors={"allreduce": math.nan})
