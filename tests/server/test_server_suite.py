"""The conformance suite of servers fails servers that break a promise."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from manyhands.errors import ManyhandsError
from manyhands.server import client, in_process, merging, store
from manyhands.server.in_process import InProcessServers
from manyhands.testing import server_suite
from manyhands.testing.server_suite import RULE_SUITE, SERVER_SUITE
from refusals import refused


def test_every_check_that_is_written_is_in_the_suite():
    names = {*(f"check_{name}" for name in SERVER_SUITE), *(f"rule_{name}" for name in RULE_SUITE)}
    assert names == {name for name in vars(server_suite) if name.startswith(("check_", "rule_"))}


@contextmanager
def servers(spec, workers, shards):
    yield InProcessServers(spec, workers, shards, timeout_s=0.3).clients


def last_offer_wins(original, self, center):
    self._center = None
    return original(self, center)


def applies_twice(original, self, worker, sequence, update, *rest):
    return original(self, worker, sequence, update * 2, *rest)


def counts_weight_zero(original, self, worker, sequence, update, weight, *rest):
    return original(self, worker, sequence, update, weight or 1.0, *rest)


def counts_from_the_last_pull(original, self, worker, sequence, update, weight, bits, since):
    return original(self, worker, sequence, update, weight, bits)


def pulls_before_it_pushes(original, self, exchange, bits):
    if exchange.into is not None:
        self.pull(exchange.into)
    wait = original(self, replace(exchange, into=None), bits)
    return lambda: replace(wait(), pulled=exchange.into is not None)


def loses_the_answer(original, self):
    exchanged = original(self)
    return exchanged and replace(exchanged, pushed=replace(exchanged.pushed, answer=None))


def ticks_without_the_gate(original, self, exchange, bits):
    return original(self, exchange, None)


def arrival_order(original, self, ticks, version):
    for rank, push in enumerate(self.held):
        push.worker = rank
    return original(self, ticks, version)


def forgets_bits(original, self):
    return [(worker, 0) for worker, _ in original(self)]


def lets_everybody_go(original, self, worker, slowest):
    return True


def own_pushes_are_stale(original, self, pushes):
    replies = original(self, pushes)
    for state in self._states:
        state.own = []
    return replies


def counts_the_center_as_a_pull(original, self, into):
    original(self, into)
    self._stores[0].pull(self._worker)


def captures_only_the_center(original, self):
    vectors, numbers = original(self)
    return {"center": vectors["center"], "sum": torch.zeros_like(vectors["center"])}, numbers


def counts_shards_as_one(original, self, operation, vector):
    self.ledger.add(operation, vector.numel() * vector.element_size(), 1)


def does_nothing(original, self, *arguments):
    return None


BROKEN = [
    (store.Store, "initialize", last_offer_wins, "first_offer_wins"),
    (in_process._Client, "_await_center", does_nothing, "pull_waits_for_the_first_center"),
    (store.Store, "push", applies_twice, "exactly_once"),
    (store.Store, "push", counts_weight_zero, "weight_zero"),
    (store.Store, "push", counts_weight_zero, "round_without_weight"),
    (store.Store, "_keep", does_nothing, "update_may_be_reused"),  # keeps the caller's tensor
    (merging.TickMerge, "take_complete", arrival_order, "in_step"),
    (store.Gate, "opened", forgets_bits, "in_step"),
    (store.Gate, "_may_go", lets_everybody_go, "gate"),
    (store.Store, "_merge", own_pushes_are_stale, "versions_and_staleness"),
    (store.Store, "push", counts_from_the_last_pull, "staleness_since"),
    (client.ServerClient, "_begin", pulls_before_it_pushes, "exchange_beside"),
    (client.ServerClient, "finish_exchange", loses_the_answer, "exchange_of_an_answer"),
    (client.ServerClient, "_begin", ticks_without_the_gate, "gate_of_an_exchange"),
    (in_process._Client, "center", counts_the_center_as_a_pull, "center_is_not_seen"),
    (in_process._Client, "deactivate", does_nothing, "last_pushes_of_a_segment"),
    (store.Store, "capture", captures_only_the_center, "capture"),
    (in_process.StoreClient, "_count", counts_shards_as_one, "traffic"),
    (in_process._Client, "_check_length", does_nothing, "refusals"),
]


def test_a_broken_server_fails():
    for owner, name, broken, check in BROKEN:
        original = getattr(owner, name)

        def instead(*arguments, original=original, broken=broken, **options):
            return broken(original, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, instead)
            refused("", SERVER_SUITE[check], servers, kind=(ManyhandsError, RuntimeError), case=(check, name, broken))
