"""compressed_mean_ beside the mean of what the codec leaves of each vector, between threads."""

import math

import torch

from manyhands.comm.codecs import Hints, Matrix, codec_of
from manyhands.comm.compressed import compressed_mean_
from manyhands.comm.reducing import naive_mean
from manyhands.comm.solo import SoloGroup
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.errors import ManyhandsError
from manyhands.testing.threads import together
from refusals import refused
from residuals import check_feedback, feedback

TEXTS = ["topk:0.2", "onebit", "threshold:0.5", "powersgd:2", "qsgd:4", "bf16", "int8"]
GATHERED = [text for text in TEXTS if text not in ("bf16", "powersgd:2")]
N = 40


def vector(rank):
    return torch.randn(N, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def hints(rank):
    """A matrix 6 x 6 at 3."""
    guess = torch.randn(6, 2, generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    return Hints(torch.Generator().manual_seed(rank), [Matrix(3, 6, 6, guess)])


def means(text, weights, bits=0, values=vector):
    """(mean, total, own) of each rank."""

    def program(worker):
        mine, own = values(worker.rank).clone(), torch.full((N,), float("nan"), dtype=torch.float64)
        weight = weights[worker.rank]
        total = compressed_mean_(worker.group, codec_of(text), mine, weight, 1 << worker.rank, hints(worker.rank), own)
        return mine, total, own

    return together(len(weights), program)


def test_the_mean_of_what_was_sent_on_every_rank():
    """Weighted, in rank order; bits are OR-ed; the same bits everywhere; what was sent is what the codec leaves."""
    weights = [1.0, 2.5, 0.5]
    for text in TEXTS:
        got = means(text, weights)
        wanted = naive_mean([own for _, _, own in got], weights)
        for rank, (mean, total, own) in enumerate(got):
            assert torch.equal(mean, got[0][0]), text
            assert (mean - wanted).abs().max() < 1e-12, text
            assert (total.weight, total.bits) == (4.0, 0b111), text
            if text in GATHERED:
                codec = codec_of(text)
                assert torch.equal(own, codec.decode(codec.encode(vector(rank), hints(rank)), N, torch.float64)), text


def test_factors_are_of_the_mean_matrix():
    """PowerSGD of N workers is PowerSGD of the mean: equal matrices give what one worker's codec gives."""
    codec = codec_of("powersgd:2")
    alone = codec.decode(codec.encode(vector(5), hints(0)), N, torch.float64)
    for mean, _, own in means("powersgd:2", [1.0, 3.0], values=lambda rank: vector(5)):
        assert (mean - alone).abs().max() < 1e-12
        assert (own - alone).abs().max() < 1e-12


def test_a_rank_of_weight_0_does_not_count_and_without_any_weight_all_stays_as_it_was():
    def nothing(rank):
        return torch.full((N,), float("nan"), dtype=torch.float64) if rank == 1 else vector(rank)

    for text in TEXTS:
        got = means(text, [1.0, 0.0, 1.0], values=nothing)
        without = means(text, [1.0, 0.0, 1.0])
        for (mean, total, _), (wanted, _, _) in zip(got, without, strict=True):
            assert torch.equal(mean, wanted), text
            assert (total.weight, total.bits) == (2.0, 0b111), text
        assert not got[1][2].any() or text == "bf16"  # which keeps there what rounding the mean took away
        for rank, (mean, total, _) in enumerate(means(text, [0.0, 0.0])):
            assert torch.equal(mean, vector(rank)), text
            assert (total.weight, total.bits) == (0.0, 0b11), text


def test_what_is_not_finite_is_seen_by_all():
    def strange(rank):
        return vector(rank).index_fill_(0, torch.tensor([7]), math.inf if rank else 0.0)

    for text in TEXTS:
        for mean, _, _ in means(text, [1.0, 1.0], values=strange):
            assert not mean[7].isfinite(), text


def test_with_one_rank_nothing_is_encoded():
    for text in TEXTS:
        mine, own, group = vector(0), torch.zeros(N, dtype=torch.float64), SoloGroup()
        total = compressed_mean_(group, codec_of(text), mine, 2.0, 5, own=own)
        assert torch.equal(mine, vector(0)), text
        assert torch.equal(own, mine), text
        assert (total.weight, total.bits, group.ledger.total_bytes) == (2.0, 5, 0), text


def test_a_weight_that_is_none_is_refused():
    group = ThreadGroup(Meeting(2), 0)
    refused("finite number of at least 0", compressed_mean_, group, codec_of("int8"), vector(0), -1.0)


class Hearing(ThreadGroup):
    """Writes down what it hears, and what it does meanwhile."""

    def __init__(self, meeting, rank):
        super().__init__(meeting, rank)
        self.heard = []

    def encoded(self, codec, n, nbytes):
        self.heard.append(("encoded", codec, n, nbytes))

    def decoded(self, codec, n, nbytes, payloads=1):
        self.heard.append(("decoded", codec, n, nbytes, payloads))

    def start_mean_(self, *arguments):
        self.heard.append("mean_")
        return super().start_mean_(*arguments)

    def all_gather(self, tensor):
        self.heard.append("all_gather")
        return super().all_gather(tensor)


def heard(text, weights):
    """By each rank."""
    meeting = Meeting(len(weights))

    def program(worker):
        group = Hearing(meeting, worker.rank)
        compressed_mean_(
            group, codec_of(text), vector(worker.rank).clone(), weights[worker.rank], 0, hints(worker.rank)
        )
        return group.heard

    return together(len(weights), program)


def test_a_timed_group_hears_of_its_payload_before_it_leaves_and_of_all_that_count_after_they_came():
    """Linear codecs decode the mean alone; PowerSGD's second factors, worked out between its two means, are encoding.
    Nothing is decoded where nobody has weight."""
    for text in GATHERED:
        codec = codec_of(text)
        sizes = [len(codec.encode(vector(rank) * (rank != 1), hints(rank))) for rank in range(3)]
        for rank, events in enumerate(heard(text, [1.0, 0.0, 2.0])):
            came = ("decoded", codec.name, N, sizes[0] + sizes[2], 2)
            assert events == [("encoded", codec.name, N, sizes[rank]), "all_gather", came], text
    for text, nbytes, count in (("bf16", 2 * N, 1), ("powersgd:2", 8 * (N - 36 + 2 * 12), 2)):
        name = codec_of(text).name
        for events in heard(text, [1.0, 1.0, 1.0]):
            assert events == [("encoded", name, N, nbytes), *["mean_"] * count, ("decoded", name, N, nbytes, 1)], text
    for text in TEXTS:
        for events in heard(text, [0.0, 0.0]):
            assert [event[0] for event in events if event[0] in ("encoded", "decoded")] == ["encoded"], text


def test_with_error_feedback_the_rounding_of_the_mean_waits_too():
    for weights in ([1.0, 1.0], [3.0, 1.0, 2.0]):
        run = feedback("bf16", weights, 100)
        check_feedback(together(len(weights), lambda worker, run=run: run(worker.group)), weights, 100)


def test_a_rank_without_weight_keeps_what_it_rounded():
    """Rank 0 adds up between threads: what it lost of the others' mean counts for as much as theirs on average."""
    (_, _, none), *others = got = means("bf16", [0.0, 1.0, 1.0])
    exact = naive_mean([vector(1).bfloat16().double(), vector(2).bfloat16().double()], [1.0, 1.0])
    assert (got[0][0] - none / 3 - exact).abs().max() < 1e-15
    assert none.any()
    assert all(torch.equal(own, vector(rank).bfloat16().double()) for rank, (_, _, own) in enumerate(others, 1))


def test_a_share_that_is_small_for_once_does_not_blow_up_the_rounding():
    def program(worker):
        mine, own = vector(worker.rank), torch.empty_like(vector(worker.rank))
        weight = [1.0, 2048.0][worker.rank]
        compressed_mean_(worker.group, codec_of("bf16"), mine.clone(), weight, 0, hints(worker.rank), own)
        return (own - mine).abs().max() / mine.abs().max()

    assert max(together(2, program)) < 0.03


def test_no_other_rank_decides_how_much_memory_is_taken(monkeypatch):
    gather = ThreadGroup.all_gather_json
    for word in (
        [1.0, "0", 1 << 50],
        [1.0, "0", -1],
        [1.0, "0", "7"],
        [-1.0, "0", 96],
        [float("inf"), "0", 96],
        [1.0, 3, 96],
        [],
        None,
    ):

        def forged(group, value, word=word):
            return gather(group, value if group.rank == 0 else word)

        monkeypatch.setattr(ThreadGroup, "all_gather_json", forged)
        refused("worker 1 announced", means, "topk:0.2", [1.0, 1.0], kind=ManyhandsError, case=word)
