import json
import math

import pytest

from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.compute import Coding, Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput

PROFILE = Profile(
    networks={
        "local": SimNetworkSpec(
            latency=1 / 3 * 1e-4,
            bandwidth=7.1e9,
            workers_per_host=1 << 40,
            local_latency=1e-6 / 7,
            local_bandwidth=math.inf,
        ),
        "sockets": SimNetworkSpec.parse("lan,host0=bandwidth:1e8"),
    },
    compute=Compute(
        row=0.1 / 3,
        step=1e-3 / 7,
        jitter="quantiles:0.9/1/1.7",
        lease=1e-4,
        merge=1e-10,
        codecs={"onebit": Coding(1e-9 / 3, 1e-9 / 7), "threshold": Coding(1e-9, 0.0, 1e-8 / 3, 1e-8 / 7)},
    ),
    task="chars:width=64",
    workers=2,
    batch_sizes=(8, 32),
    measured="2026-02-01T12:00:00+00:00",
    machine={"torch": "2.13.0", "cores": "2"},
    errors={"allreduce": -0.031, "local-sgd:period=8": 0.1},
)


@pytest.fixture
def path(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def changed(path, **changes):
    output = json.loads(path.read_text())
    output.update(changes)
    path.write_text(json.dumps({name: value for name, value in output.items() if value is not None}))
    return path


def test_what_was_saved_is_loaded_exactly(path):
    assert Profile.load(path) == PROFILE
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def test_the_least_is_enough(tmp_path):
    profile = Profile(networks={"local": SimNetworkSpec()}, compute=Compute(), task="digits", workers=1)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert profile.network == SimNetworkSpec()


def test_a_profile_that_says_nothing_of_codecs_is_loaded(path):
    """As they were before codecs took time."""
    compute = Profile.load(changed(path, compute="row=0.1,lease=1e-4")).compute
    assert (compute.row, compute.codecs) == (0.1, {})


def test_an_engine_reads_it_once_and_goes_by_what_it_read(path):
    engine = Sim(profile=path)
    path.unlink()
    for _ in range(2):
        assert engine.launch(lambda worker: worker.size, LaunchSpec(workers=2)) == [2, 2]
    assert engine.parts[:2] == (PROFILE.network, PROFILE.compute)
    assert engine.on_one_host(2)


def test_a_person_can_read_it(path):
    output = json.loads(path.read_text())
    assert (output["kind"], output["schema"]) == ("manyhands profile", 1)
    assert output["networks"]["sockets"] == str(SimNetworkSpec.parse("lan,host0=bandwidth:1e8"))


@pytest.mark.parametrize("networks", [{}, {"sockets": SimNetworkSpec()}])
def test_the_local_network_is_always_there(networks):
    with pytest.raises(BadInput, match="a profile must have a network 'local'"):
        Profile(networks=networks, compute=Compute(), task="digits", workers=1)


def test_an_error_that_is_no_number():
    with pytest.raises(BadInput, match="a profile's prediction error of allreduce must be a finite number; got nan"):
        Profile(
            networks={"local": SimNetworkSpec()},
            compute=Compute(),
            task="digits",
            workers=1,
            errors={"allreduce": math.nan},
        )


def test_no_file(tmp_path):
    with pytest.raises(BadInput, match=r"gone.json cannot be read \(No such file.*manyhands calibrate TASK"):
        Profile.load(tmp_path / "gone.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{}x"])
def test_no_json(path, content):
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is not JSON.*write it again with"):
        Profile.load(path)


@pytest.mark.parametrize("content", ["[]", "{}", '"text"', '{"kind": "other"}'])
def test_another_kind_of_file(path, content):
    path.write_text(content)
    with pytest.raises(BadInput, match="is not a profile of manyhands"):
        Profile.load(path)


def test_a_file_cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match="is not JSON"):
        Profile.load(path)


@pytest.mark.parametrize("schema", [2, "1", None])
def test_another_schema(path, schema):
    with pytest.raises(BadInput, match=f"has schema {schema!r}, and this version reads 1"):
        Profile.load(changed(path, schema=schema))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": None, "extra": 1}, "lacks compute, has extra, which is unknown"),
        ({"compute": "row=fast"}, "is damaged: compute: row must be a time"),
        ({"compute": "topk=1ns/-1ns"}, "is damaged: compute: topk must be a time"),
        ({"networks": {"local": "speed=1"}}, "is damaged: network has no option 'speed'"),
        ({"networks": {"sockets": "lan"}}, "is damaged: a profile must have a network 'local'"),
        ({"networks": "lan"}, "is damaged: networks has the wrong type"),
        ({"networks": {"local": 1}}, "is damaged: networks has the wrong type"),
        ({"workers": "two"}, 'is damaged: workers has the wrong type: "two"'),
        ({"workers": True}, "is damaged: workers has the wrong type"),
        ({"workers": 0}, "is damaged: a profile must be of at least 1 worker; got 0"),
        ({"batch_sizes": [1.5]}, "is damaged: batch_sizes has the wrong type"),
        ({"errors": {"allreduce": "small"}}, "is damaged: errors has the wrong type"),
    ],
)
def test_a_damaged_file(path, changes, message):
    with pytest.raises(BadInput, match=message):
        Profile.load(changed(path, **changes))
