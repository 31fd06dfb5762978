from __future__ import annotations

from refused_cases import all_refused

from manyhands.engines.base import LaunchSpec
from manyhands.engines.roles import Roles
from manyhands.errors import UnknownName


def test_ranks_are_chief_workers_ps_evaluator_whatever_the_order_asked() -> None:
    roles = Roles(workers=2, others={"evaluator": 1, "ps": 2, "chief": 1})
    assert list(map(roles.name_of, range(6))) == ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0"]
    assert roles.awaited == {0, 1, 2}
    assert Roles(workers=1, others={"ps": 0}).counts == {"worker": 1}


def test_until_says_whose_return_ends_the_run() -> None:
    for until, awaited in (
        (("chief",), {0}),
        (("worker",), {1, 2}),
        (("chief", "worker", "evaluator"), {0, 1, 2, 4}),
        (["ps"], {3}),
    ):
        roles = Roles(workers=2, others={"chief": 1, "ps": 1, "evaluator": 1}, until=until)  # type: ignore[arg-type]
        assert roles.awaited == awaited, until


def test_what_no_cluster_can_be() -> None:
    one = {"workers": 1, "others": {}}
    all_refused(
        lambda options: Roles(**options),
        [
            ({"workers": 0, "others": {}}, "workers must be a whole number of at least 1, not 0"),
            ({"workers": 1, "others": {"worker": 2}}, "must not contain worker"),
            ({"workers": 1, "others": {"ps": True}}, "number of ps must be a whole number, 0 or more, not True"),
            ({"workers": 1, "others": {"chief": 2}}, "at most one chief, not 2"),
            ({"workers": 1, "others": {"evaluator": 2}}, "at most one evaluator, not 2"),
            (one | {"until": "worker"}, r"until must be a tuple of roles.*'worker',"),
            (one | {"until": ("chief",)}, "names no role of this cluster: choose from worker"),
            (one | {"until": ()}, "names no role of this cluster"),
        ],
    )
    unknown = [
        ({"workers": 1, "others": {"master": 1}}, "no role 'master'; choose from chief, ps, evaluator"),
        (one | {"until": ("boss",)}, "no role 'boss'; choose from chief, worker, ps"),
    ]
    all_refused(lambda options: Roles(**options), unknown, UnknownName)


def test_a_launch_names_and_awaits_by_roles_and_else_calls_all_workers() -> None:
    plan = LaunchSpec(workers=2)
    assert plan.awaited == {0, 1}
    assert [plan.name_of(process_index) for process_index in (1, -1)] == ["worker 1", "server shard 0"]
    plan = LaunchSpec(workers=2, roles=Roles(workers=1, others={"ps": 1}))
    assert plan.awaited == {0}
    assert [plan.name_of(process_index) for process_index in (0, 1, -2)] == ["worker 0", "ps 0", "server shard 1"]
