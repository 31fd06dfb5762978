"""kernels/skip_gram.py: the suite of kernels, its rules by hand, what is drawn, topics that it finds, and its model."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from products import conforms

import manyhands as mh
from manyhands import kernels
from manyhands.data.corpus import Corpus, Vocabulary
from manyhands.errors import UnknownName
from manyhands.kernels.word_vectors import WordVectors
from refusals import refused

VARIANTS: dict[str, dict[str, Any]] = {
    "skip-gram": {},
    "many drawn": {"negative": 13},
    "unshared": {"shared": False},
    "bag of words": {"cbow": True},
    "hierarchical": {"hierarchical": True},
    "hierarchical bag of words": {"hierarchical": True, "cbow": True},
    "short": {"dim": 3},
    "long": {"dim": 16},
}


def zipf_corpus() -> Corpus:
    random = np.random.default_rng(0)
    return Corpus.of_tokens([[f"w{i}" for i in random.zipf(1.5, 30) % 40] for _ in range(9)], min_count=2)


def vocabulary(*counts: int) -> Vocabulary:
    return Vocabulary([f"w{i}" for i in range(len(counts))], counts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_suite(variant: str) -> None:
    from manyhands.kernels.skip_gram import reference_step

    corpus = zipf_corpus()
    options = {"dim": 21, "sample": 0.05, "dtype": "float64", **VARIANTS[variant]}
    kernel = kernels.SkipGram(vocabulary=corpus.vocabulary, **options)
    conforms(kernel=kernel, batch=corpus[2:5], reference=reference_step)


def batch_of(contexts: list[int], outputs: list[int], signs: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """One group."""
    from manyhands.kernels.skip_gram import OUTPUTS

    rest = OUTPUTS - len(outputs)
    return {
        "contexts": np.array(contexts, np.uint32),
        "outputs": np.array([outputs + outputs[:1] * rest], np.uint32),
        "signs": np.array([signs + [0] * rest], np.int8),
        "begins": np.array([0]),
        "ends": np.array([len(contexts)]),
        "examples": np.array([1]),
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_one_step_by_hand() -> None:
    """Word 1 is a context of centre 0, and word 2 was drawn: -log s(h·a) - log s(-h·b), one step down its gradient."""
    counts, rate = vocabulary(3, 2, 1), 0.5
    kernel = kernels.SkipGram(vocabulary=counts, dim=1, dtype="float64")
    h, a, b = 0.7, -1.1, 0.4
    rows = {"words": np.array([[9.0], [h], [9.0]]), "outputs": np.array([[a], [9.0], [b]])}
    loss = kernel.step(rows, batch_of([1], [0, 2], [1, -1]), rate)
    assert loss == pytest.approx(-math.log(sigmoid(h * a)) - math.log(sigmoid(-h * b)), abs=1e-9)
    up, down = 1 - sigmoid(h * a), -sigmoid(h * b)
    assert rows["outputs"].ravel() == pytest.approx([a + rate * up * h, 9.0, b + rate * down * h], abs=1e-9)
    assert rows["words"].ravel() == pytest.approx([9.0, h + rate * (up * a + down * b), 9.0], abs=1e-9)
    # contexts of one centre move as one step: both meet the output as it was, and it moves by both
    g = -0.2
    rows = {"words": np.array([[9.0], [h], [g]]), "outputs": np.array([[a], [9.0], [9.0]])}
    kernel.step(rows, batch_of([1, 2], [0], [1]), rate)
    by_h, by_g = rate * (1 - sigmoid(h * a)), rate * (1 - sigmoid(g * a))
    assert rows["outputs"][0, 0] == pytest.approx(a + by_h * h + by_g * g, abs=1e-9)
    assert rows["words"].ravel() == pytest.approx([9.0, h + by_h * a, g + by_g * a], abs=1e-9)
    # of a bag of words every context moves by the whole slope of the mean: word2vec.c's rule
    bag = kernels.SkipGram(vocabulary=counts, dim=1, dtype="float64", cbow=True)
    rows = {"words": np.array([[9.0], [h], [g]]), "outputs": np.array([[a], [9.0], [9.0]])}
    loss, mean = bag.step(rows, batch_of([1, 2], [0], [1]), rate), (h + g) / 2
    by = rate * (1 - sigmoid(mean * a))
    assert loss == pytest.approx(-math.log(sigmoid(mean * a)), abs=1e-9)
    assert rows["outputs"][0, 0] == pytest.approx(a + by * mean, abs=1e-9)
    assert rows["words"].ravel() == pytest.approx([9.0, h + by * a, g + by * a], abs=1e-9)


def test_sigmoid_and_loss_are_exact_up_to_margins_of_40() -> None:
    for dtype, close in (("float64", 1e-7), ("float32", 1e-5)):
        kernel = kernels.SkipGram(vocabulary=vocabulary(3, 2, 1), dim=1, dtype=dtype)
        for dot in (-60.0, -39.0, -1e-3, 0.0, 7.0, 39.0, 60.0):
            rows = {"words": np.ones((3, 1), dtype), "outputs": np.full((3, 1), dot, dtype)}
            loss = kernel.step(rows, batch_of([1], [0], [1]), 1.0)
            exact = min(max(dot, -40), 40)
            assert loss == pytest.approx(math.log1p(math.exp(-exact)), rel=close, abs=close), (dtype, dot)
            assert rows["outputs"][0, 0] - dot == pytest.approx(1 - sigmoid(exact), abs=close), (dtype, dot)
    # a sum of far more losses than the product of their probabilities can hold
    kernel = kernels.SkipGram(vocabulary=vocabulary(3, 2, 1), dim=1, dtype="float64")
    rows = {"words": np.full((3, 1), 5.0), "outputs": np.full((3, 1), -5.0)}
    batch = batch_of([1] * 10, [0, 1, 2], [1, 1, 1])
    many = {name: np.concatenate([column] * 50) for name, column in batch.items() if name != "contexts"}
    mean, weight = kernel.measure(rows, {**many, "contexts": batch["contexts"], "examples": np.array([500])})["loss"]
    assert (mean, weight) == (pytest.approx(3 * math.log1p(math.exp(25))), 500)


def test_words_are_drawn_by_their_count_to_the_power_of_three_quarters() -> None:
    corpus = Corpus.of_tokens([["a"] * 4000 + ["b"] * 500 + ["c"] * 60 + ["d", "e"] * 4000], min_count=1)
    kernel = kernels.SkipGram(vocabulary=corpus.vocabulary, negative=1, sample=0.0)
    batch = kernel.prepare(corpus, 5)
    centres, drawn = batch["outputs"][:, 0], batch["outputs"][:, 1]
    weights = corpus.vocabulary.counts**0.75
    for centre in (0, 1):
        others = drawn[(centres == centre) & (batch["signs"][:, 1] == -1)]
        wanted = np.where(np.arange(5) == centre, 0, weights)
        wanted = wanted / wanted.sum()
        found = np.bincount(others, minlength=5) / len(others)
        assert np.abs(found - wanted).max() < 4 * math.sqrt(0.25 / len(others))
        assert found[centre] == 0


def test_no_word_is_drawn_twice_for_one_centre() -> None:
    kernel = kernels.SkipGram(vocabulary=zipf_corpus().vocabulary, negative=11)
    batch = kernel.prepare(zipf_corpus(), 1)
    outputs, signs = (batch[name].reshape(-1, 2 * batch[name].shape[1]) for name in ("outputs", "signs"))
    assert (batch["signs"] == 0).any()
    for keys, own in zip(outputs, signs, strict=True):
        there = keys[own != 0]
        assert len(set(there)) == len(there)
        assert own[0] == 1
        assert set(own[1:]) <= {-1, 0}


def test_frequent_words_are_left_out_as_by_word2vec() -> None:
    tokens = ["often"] * 9000 + [f"w{i % 500}" for i in range(10_000)]
    random = np.random.default_rng(0)
    corpus = Corpus.of_tokens([random.permutation(tokens).tolist()], min_count=1)
    share, sample = 9000 / 19_000, 0.01
    centres = kernels.SkipGram(vocabulary=corpus.vocabulary, sample=sample).prepare(corpus, 3)["outputs"][:, 0]
    stay = math.sqrt(sample / share) + sample / share
    assert (centres == 0).sum() == pytest.approx(9000 * stay, rel=0.06)
    assert (centres != 0).sum() == pytest.approx(10_000, abs=2)
    everything = kernels.SkipGram(vocabulary=corpus.vocabulary, sample=0.0).prepare(corpus, 3)["outputs"][:, 0]
    assert len(everything) == 19_000


def test_windows_reach_one_to_window_words_each_way() -> None:
    words = [f"w{i:03}" for i in range(600)]
    corpus = Corpus.of_tokens([words, words[::-1]], min_count=1)
    batch = kernels.SkipGram(vocabulary=corpus.vocabulary, window=4, sample=0.0).prepare(corpus[:1], 8)
    reaches = []
    for centre, begin, end in zip(batch["outputs"][:, 0].astype(int), batch["begins"], batch["ends"], strict=True):
        contexts = batch["contexts"][begin:end].astype(int)
        reach = int(np.abs(contexts - centre).max())
        assert sorted(contexts) == [
            c for c in range(max(0, centre - reach), min(600, centre + reach + 1)) if c != centre
        ]
        reaches.append(reach)
    assert np.bincount(reaches, minlength=5)[1:] == pytest.approx([150] * 4, abs=45)
    assert int(batch["examples"][0]) == len(batch["contexts"])


def test_no_pair_reaches_over_the_end_of_a_line() -> None:
    corpus = Corpus.of_tokens([["a", "b"], ["c"], ["d", "e"]] * 3, min_count=1)
    batch = kernels.SkipGram(vocabulary=corpus.vocabulary, sample=0.0).prepare(corpus, 0)
    names = corpus.vocabulary.words
    pairs = {
        (names[keys[0]], names[context])
        for keys, begin, end in zip(batch["outputs"], batch["begins"], batch["ends"], strict=True)
        for context in batch["contexts"][begin:end]
    }
    assert pairs == {("a", "b"), ("b", "a"), ("d", "e"), ("e", "d")}
    corpus = Corpus.of_tokens([["a"], ["b"]], min_count=1)  # lines of one word weigh nothing
    kernel = kernels.SkipGram(vocabulary=corpus.vocabulary)
    batch = kernel.prepare(corpus, 0)
    assert kernel.weight(batch, 2) == 0
    assert kernel.measure(kernel.module(0).tables(), batch) == {"loss": (0.0, 0)}


def test_paths_of_a_huffman_tree() -> None:
    """Probabilities of all words add up to one, whatever the nodes' vectors; and no code is shorter in the mean."""
    for counts in ((5, 2, 1, 1), (1, 1), (7,), tuple(range(60, 0, -1)), (1000, 500, 250, 125, 60, 30, 15)):
        kernel = kernels.SkipGram(vocabulary=vocabulary(*counts), hierarchical=True)
        offsets, nodes, signs = kernel._paths
        lengths = np.diff(offsets)
        scores = np.random.default_rng(0).normal(size=max(1, len(counts) - 1))
        assert nodes.max() < len(scores), counts
        right = 1 / (1 + np.exp(-signs * scores[nodes]))
        total = sum(right[begin:end].prod() for begin, end in itertools.pairwise(offsets))
        assert total == pytest.approx(1 if len(counts) > 1 else right[0]), counts
        bits = -np.log2(np.array(counts) / sum(counts))
        mean, entropy = (np.average(x, weights=counts) for x in (lengths, bits))
        assert entropy - 1e-9 <= mean < entropy + 1 + (len(counts) == 1), counts
        if counts == (5, 2, 1, 1):
            assert lengths.tolist() == [1, 2, 3, 3]


def test_it_finds_planted_topics() -> None:
    """Each line has words of one topic alone: word w17 is of topic 0, w27 of topic 1."""
    random = np.random.default_rng(1)
    lines = random.integers(0, 10, 2500)[:, None] * 20 + random.integers(0, 20, (2500, 12))
    corpus = Corpus.of_tokens([[f"w{word}" for word in line] for line in lines])
    kernel = kernels.SkipGram(vocabulary=corpus.vocabulary, dim=30, sample=0.0)
    task = mh.Task(kernel=kernel, rate=0.05, last_rate=1e-4, train_data=corpus, batch_size_per_worker=400, epochs=4)
    run = mh.train(task, strategy="solo")
    nearest = {word: run.model.most_similar(word) for word in run.model.vocabulary.words}
    right = [int(word[1:]) // 20 == int(other[1:]) // 20 for word, ten in nearest.items() for other, _ in ten]
    assert np.mean(right) >= 0.99
    losses = [row["loss"] for row in run.history]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


@pytest.fixture
def model() -> WordVectors:
    """Words on a circle: w0 at 0°, w1 at 10°, …, of different lengths."""
    made = kernels.SkipGram(vocabulary=vocabulary(*range(36, 0, -1)), dim=2).module(0)
    angles = np.arange(36) * np.pi / 18
    with torch.no_grad():
        made.words.copy_(torch.tensor(np.stack([np.cos(angles), np.sin(angles)], 1) * (1 + angles[:, None])))
    return made


def test_neighbours(model: WordVectors) -> None:
    assert [word for word, _ in model.most_similar("w5", topn=2)] in (["w4", "w6"], ["w6", "w4"])
    assert model.most_similar("w5", topn=1)[0][1] == pytest.approx(math.cos(math.pi / 18))
    assert model.similarity("w0", "w9") == pytest.approx(0, abs=1e-6)
    assert model.similarity("w3", "w21") == pytest.approx(-1)
    assert model.vector("w9") == pytest.approx([0, 1 + np.pi / 2], abs=1e-6)
    assert len(model.most_similar("w0", topn=99)) == 35
    assert model.most_similar(["w2", "w4"], topn=1)[0][0] == "w3"  # the middle
    assert model.most_similar(["w9", "w1"], ["w0"], topn=1)[0][0] in ("w8", "w10")
    assert model.most_similar([], "w0", topn=1)[0][0] == "w18"


def test_words_that_are_not_known_or_that_files_cannot_hold(model: WordVectors, tmp_path: Path) -> None:
    refused("no word 'w333' among the 36 words .*w33", model.vector, "w333", kind=UnknownName)
    refused("none is spelt nearly so", model.most_similar, "something else", kind=UnknownName)
    refused("at least one word", model.most_similar, [])
    made = kernels.SkipGram(vocabulary=Vocabulary(["new york"], [1]), dim=2).module(0)
    refused("'new york' has some", made.save, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_files_of_word2vec(model: WordVectors, tmp_path: Path) -> None:
    model.save(tmp_path / "text")
    model.save(tmp_path / "binary", binary=True)
    vectors = model.words.detach().numpy()
    head, *lines = (tmp_path / "text").read_text().splitlines()
    assert head == "36 2"
    assert [line.split(" ")[0] for line in lines] == list(model.vocabulary.words)
    assert np.array_equal(np.array([line.split(" ")[1:] for line in lines], np.float32), vectors)
    pairs = zip(model.vocabulary.words, vectors.astype("<f4"), strict=True)
    binary = b"".join(word.encode() + b" " + vector.tobytes() + b"\n" for word, vector in pairs)
    assert (tmp_path / "binary").read_bytes() == b"36 2\n" + binary


def test_bad_input() -> None:
    for options, words in [
        ({"dim": 0}, "dim must be a whole number"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"negative": 0}, "hierarchical=True, which draws no words, or negative of at least 1"),
        ({"negative": 5, "hierarchical": True}, "hierarchical=True, which draws no words"),
        ({"sample": -1}, "sample must be a number from 0 to 1"),
        ({"vocabulary": ["a"]}, "vocabulary must be a corpus's, not a list"),
    ]:
        refused(words, lambda options: kernels.SkipGram(**{"vocabulary": vocabulary(2, 1), **options}), options)
    kernel = kernels.SkipGram(vocabulary=vocabulary(2, 1))
    refused("give train_data as a Corpus, not what gives batches of dict", kernel.prepare, {"x": 1}, 0)
    refused("vocabulary of 2 words, and its text one of", kernel.prepare, zipf_corpus(), 0)
