from __future__ import annotations

from manyhands.engines.hosts.roster import Offer, Roster, free_name, hello


def roster() -> Roster:
    return Roster(4, [Offer("alpha", 2)])


def test_who_may_join() -> None:
    """Whoever has the same versions, and no more workers than are missing, unless members may change."""
    assert roster().refusal(hello(2)) == roster().refusal(hello(1)) == ""
    wanted = "this run needs 2 more of its 4 workers, and this host offers 3: join with --workers 2"
    assert wanted in roster().refusal(hello(3))
    assert "offers 3" in Roster(2, [Offer("alpha", 1)]).refusal(hello(3))
    assert Roster(2, [Offer("alpha", 1)], takes_part_of_offers=True).refusal(hello(3)) == ""
    full = roster()
    full.offers.append(Offer("beta", 2))
    assert full.refusal(hello(1)).startswith("this run has all of its workers already (4)")


def test_other_versions_are_named() -> None:
    for name in ("python", "torch", "manyhands"):
        output = hello(1)
        output["versions"][name] = "0.0"
        refusal = roster().refusal(output)
        assert "versions differ" in refusal
        assert f"{name} 0.0" in refusal


def test_what_is_no_offer() -> None:
    for change in (
        {"purpose": "ring"},
        {"purpose": None},
        {"workers": 0},
        {"workers": True},
        {"workers": "2"},
        {"host": 7},
        {"versions": []},
    ):
        assert roster().refusal({**hello(1), **change}), change


def test_ranks_are_contiguous_on_every_host_and_hosts_of_one_name_are_told_apart() -> None:
    four = Roster(5, [Offer("alpha", 2), Offer("beta", 1), Offer("gamma", 2)])
    assert four.process_indices() == [[0, 1], [2], [3, 4]]
    assert four.missing == 0
    same = Roster(4, [Offer("alpha", 2), Offer("alpha", 1)])
    assert same.names() == ["alpha (1)", "alpha (2)"]
    assert same.text() == "workers that are here: 3 of 4 (alpha (1) 2, alpha (2) 1)"


def test_a_hosts_name_commands_no_terminal_and_forges_no_line() -> None:
    output = {**hello(1), "host": "beta\x1b[2J\nWARNING: all is well" + "x" * 1000}
    assert roster().refusal(output) == ""
    assert Roster.name_of(output).startswith("beta?[2J?WARNING: all is well")
    assert len(Roster.name_of(output)) == 64
    refused = roster().refusal({**output, "versions": {"python\x1b[1m": "3\n"}})
    assert "python?[1m 3?" in refused
    assert roster().refusal({**output, "host": ""}) != ""


def test_a_host_that_joins_later_has_a_name_of_its_own() -> None:
    for names, name in (
        (["alpha"], "beta"),
        (["alpha", "beta"], "beta (2)"),
        (["beta (1)", "beta (2)"], "beta (3)"),
        (["beta (1)"], "beta (2)"),  # the one that had it is lost
        (["beta", "beta (2)"], "beta (3)"),
    ):
        assert free_name("beta", names) == name, names
