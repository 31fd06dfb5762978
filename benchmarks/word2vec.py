"""Word vectors beside gensim's: raw words/s, and what the vectors know.

    python benchmarks/word2vec.py [--corpus FILE] [--peer-python PYTHON] [--dims 100 300] [--blocks 5] [--epochs 5]
                                  [--seeds 3] [--workers 2] [--cbow] [--words N] [--parts speed lines quality topics] [--json FILE]

In alternating blocks, skip-gram by `hogwild` and by gensim with as many workers: window 5, negative 5, sample 1e-3, min_count 5,
equal epochs. Seconds are of training alone, from the first step to the last, with what is compiled in the first; CPU seconds are
of all workers. Then lines of 3 to 8 words beside lines of 1,000; WordSim-353, SimLex-999 and analogies (gensim's test data) by
seed, once for each; and topics that were planted in a text. Needs scipy here, and gensim in the interpreter of --peer-python
(default: this one). The default corpus is made of Debian's packages dict-gcide dict-foldoc dict-jargon fortunes: apt-get install
them; their text is lower-cased, and has letters only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import machine
import numpy as np
from scipy.stats import spearmanr

import manyhands as mh
from manyhands.data.corpus import Corpus
from manyhands.kernels.word_vectors import WordVectors
from manyhands.tasks.word2vec_task import word2vec

DICTIONARIES, FORTUNES = Path("/usr/share/dictd"), Path("/usr/share/games/fortunes")
GOALS = {100: 3.0, 300: 2.2}
SHORT_GOAL, QUALITY_GOAL, PURITY_GOAL = 0.8, -0.02, 0.99
MOST_WORDS = 300_000
"""Analogies are asked among so many of the most frequent words, as gensim does."""

Vectors = tuple[dict[str, int], np.ndarray[Any, Any]]  # numbers of words, and rows of length 1


def main() -> None:
    args = arguments()
    machine.facts()
    with tempfile.TemporaryDirectory() as folder:
        corpus = args.corpus or debian_text(Path(folder) / "corpus.txt", args.words)
        parts: dict[str, Callable[..., Any]] = {"speed": speed, "lines": lines, "quality": quality, "topics": topics}
        found = {name: parts[name](args, corpus, Path(folder)) for name in args.parts}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


# -- the parts ---------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, corpus: Path, folder: Path) -> dict[str, Any]:
    found = {}
    for dim in args.dims:
        blocks: list[dict[str, float]] = []
        for block in range(args.blocks):
            ours, _ = train(args, corpus, dim, block)
            theirs, _ = peer(args, corpus, folder, dim, block)
            blocks.append({**named("ours", ours), **named("gensim", theirs)})
            print(f"dim {dim}, block {block}: {text(ours, 'ours')}; {text(theirs, 'gensim')}", flush=True)
        medians = {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}
        ratios = {kind: medians[f"ours_{kind}"] / medians[f"gensim_{kind}"] for kind in ("per_wall_s", "per_cpu_s")}
        goal = f" (goal {GOALS[dim]})" if dim in GOALS else ""
        print(
            f"dim {dim}, medians, raw words/s: ours {medians['ours_per_wall_s']:,.0f}, gensim {medians['gensim_per_wall_s']:,.0f}, ratio "
            f"{ratios['per_wall_s']:.2f}{goal}; by CPU second: {medians['ours_per_cpu_s']:,.0f}, {medians['gensim_per_cpu_s']:,.0f}, ratio "
            f"{ratios['per_cpu_s']:.2f}\n"
        )
        found[dim] = {"blocks": blocks, "medians": medians, "ratios": ratios}
    return found


def lines(args: argparse.Namespace, corpus: Path, folder: Path) -> dict[str, Any]:
    """The same words in lines of 3 to 8, and in lines of 1,000."""
    words = corpus.read_text().split()
    random = np.random.default_rng(0)
    texts = {"short": folder / "short.txt", "long": folder / "long.txt"}
    write_lines(texts["short"], words, iter(lambda: int(random.integers(3, 9)), 0))
    write_lines(texts["long"], words, iter(lambda: 1000, 0))
    blocks = []
    for block in range(args.blocks):
        rates = {name: train(args, path, 100, block, epochs=1)[0] for name, path in texts.items()}
        blocks.append({f"{name}_{kind}": rate[kind] for name, rate in rates.items() for kind in rate})
        print(f"lines, block {block}: " + "; ".join(text(rate, name) for name, rate in rates.items()), flush=True)
    medians = {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}
    ratios = {kind: medians[f"short_{kind}"] / medians[f"long_{kind}"] for kind in ("per_wall_s", "per_cpu_s")}
    print(
        f"lines of 3 to 8 words beside lines of 1,000: {ratios['per_wall_s']:.2f} of the words/s, by CPU second {ratios['per_cpu_s']:.2f} (goal "
        f"{SHORT_GOAL})\n"
    )
    return {"blocks": blocks, "medians": medians, "ratios": ratios}


def quality(args: argparse.Namespace, corpus: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "gensim": []}
    for seed in range(args.seeds):
        _, model = train(args, corpus, args.dims[0], seed)
        theirs, vectors = peer(args, corpus, folder, args.dims[0], seed)
        data = Path(theirs["test_data"])
        found["ours"].append(scores((model.vocabulary.numbers, model.unit_vectors()), data))
        found["gensim"].append(scores(vectors, data))
        for name, by_seed in found.items():
            print(
                f"seed {seed} {name:6} " + ", ".join(f"{test} {score:.3f}" for test, score in by_seed[-1].items()),
                flush=True,
            )
    means = {
        name: {test: statistics.mean(s[test] for s in by_seed) for test in by_seed[0]}
        for name, by_seed in found.items()
    }
    for test, mean in means["ours"].items():
        other = means["gensim"][test]
        print(
            f"{test}: mean ours {mean:.3f}, gensim {other:.3f}, difference {mean - other:+.3f} (goal {QUALITY_GOAL:+} or more)"
        )
    return {"seeds": found, "means": means}


def topics(args: argparse.Namespace, corpus: Path, folder: Path) -> dict[str, float]:
    """A text whose lines are of one topic each: the share of a word's ten nearest that are of its topic."""
    random = np.random.default_rng(0)
    own = 50  # words of each of 20 topics
    planted = folder / "topics.txt"
    rows = random.integers(0, 20, 20_000)[:, None] * own + random.integers(0, own, (20_000, 20))
    planted.write_text("\n".join(" ".join(f"w{word}" for word in row) for row in rows))
    _, model = train(args, planted, 50, 0)
    found = purity(model, own)
    print(f"planted topics: purity@10 {found:.4f} (goal {PURITY_GOAL})")
    return {"purity": found}


def purity(model: WordVectors, own: int) -> float:
    """The share of each word's ten nearest that are of its topic: word w17 is of topic 17 // own."""
    unit = model.unit_vectors()
    topic = np.array([int(word[1:]) // own for word in model.vocabulary.words])
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1)[:, :10]
    return float((topic[nearest] == topic[:, None]).mean())


# -- both sides --------------------------------------------------------------------------------------------------------


def train(
    args: argparse.Namespace, corpus: Path, dim: int, seed: int, epochs: int | None = None
) -> tuple[dict[str, float], WordVectors]:
    """(raw words by second, the model)"""
    clock = Clock()
    options = {"dim": dim, "cbow": args.cbow, "epochs": epochs or args.epochs, "seed": seed}
    task = word2vec(str(corpus), **options, worker_callback=clock)
    run = mh.train(task, strategy="hogwild", engine="local", workers=args.workers, threads_per_worker=1)
    model = run.model
    assert isinstance(model, WordVectors)
    assert isinstance(task.train_data, Corpus)
    words = task.train_data.counted.words * task.epochs
    return {"per_wall_s": words / clock.wall_s, "per_cpu_s": words / clock.cpu_s}, model


def peer(args: argparse.Namespace, corpus: Path, folder: Path, dim: int, seed: int) -> tuple[dict[str, Any], Vectors]:
    out = folder / "vectors.bin"
    program = Path(__file__).with_name("word2vec_peer.py")
    options = {"dim": dim, "workers": args.workers, "epochs": args.epochs, "seed": seed, "cbow": int(args.cbow)}
    command = [args.peer_python, str(program), str(corpus), str(out)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    words = sum(len(line.split()) for line in corpus.open()) * args.epochs
    rates = {"per_wall_s": words / found["wall_s"], "per_cpu_s": words / found["cpu_s"]}
    return {**rates, "test_data": found["test_data"]}, read_vectors(out)


class Clock(mh.WorkerCallbackFactory):
    """Wall seconds of worker 0 and CPU seconds of all workers, from before the first step to after the last."""

    wall_s = cpu_s = 0.0

    def check(self, one_model: bool) -> None: ...

    def create(self, worker: Any, replica: Any) -> mh.WorkerCallback:
        return Ticking(worker)

    def on_result(self, result: Any) -> None:
        self.wall_s, self.cpu_s = result["wall_s"], sum(result["cpu_s"])


class Ticking(mh.WorkerCallback):
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def on_start(self, facts: Mapping[str, Any]) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_epoch_start(self, epoch: int) -> None: ...

    def on_step(self, loss: float | None) -> bool:
        return False

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        return False

    def on_end(self) -> Any:
        cpu = self._worker.mesh.data.all_gather_json(time.process_time() - self._cpu)
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": cpu}


def named(prefix: str, rates: Mapping[str, Any]) -> dict[str, float]:
    return {f"{prefix}_{kind}": rates[kind] for kind in ("per_wall_s", "per_cpu_s")}


def text(rates: Mapping[str, Any], name: str) -> str:
    return f"{name} {rates['per_wall_s']:,.0f} words/s, {rates['per_cpu_s']:,.0f} by CPU second"


# -- what vectors know -------------------------------------------------------------------------------------------------


def read_vectors(path: Path) -> Vectors:
    """Of word2vec's binary format."""
    with path.open("rb") as file:
        count, dim = map(int, file.readline().split())
        words, rows = {}, np.empty((count, dim), np.float32)
        for i in range(count):
            word = bytearray()
            while (byte := file.read(1)) != b" ":
                word += byte
            words[word.decode().strip()] = i
            rows[i] = np.frombuffer(file.read(4 * dim), np.float32)
    return words, rows / np.linalg.norm(rows, axis=1, keepdims=True)


def scores(vectors: Vectors, data: Path) -> dict[str, float]:
    return {
        "WordSim-353": similarity(vectors, data / "wordsim353.tsv"),
        "SimLex-999": similarity(vectors, data / "simlex999.txt"),
        "analogies": analogies(vectors, data / "questions-words.txt"),
    }


def similarity(vectors: Vectors, file: Path) -> float:
    """Spearman's correlation of cosines with people's numbers, over the pairs whose words are known."""
    numbers, unit = vectors
    rows = [line.lower().split("\t") for line in file.read_text().splitlines() if not line.startswith("#")]
    known = [(numbers[a], numbers[b], float(score)) for a, b, score in rows if a in numbers and b in numbers]
    a, b, wanted = (np.array(column) for column in zip(*known, strict=True))
    return float(spearmanr((unit[a] * unit[b]).sum(1), wanted).statistic)


def analogies(vectors: Vectors, file: Path) -> float:
    """The share answered rightly of those whose words are known: "a is to b as c to …", the asked ones left out."""
    numbers, unit = vectors
    rows = [line.lower().split() for line in file.read_text().splitlines() if not line.startswith(":")]
    known = np.array(
        [[numbers[word] for word in row] for row in rows if all(numbers.get(w, MOST_WORDS) < MOST_WORDS for w in row)]
    )
    unit = unit[:MOST_WORDS]
    right = 0
    for some in np.array_split(known, max(1, len(known) // 200)):
        a, b, c, wanted = some.T
        cosines = (unit[b] - unit[a] + unit[c]) @ unit.T
        for asked in (a, b, c):
            cosines[np.arange(len(some)), asked] = -np.inf
        right += int((cosines.argmax(1) == wanted).sum())
    return right / len(known)


# -- texts -------------------------------------------------------------------------------------------------------------


def debian_text(path: Path, most: int | None) -> Path:
    """The articles of the dictionaries and the fortunes, one a line; at most so many words."""
    files = [*sorted(DICTIONARIES.glob("*.dict.dz")), *(f for f in sorted(FORTUNES.glob("*")) if not f.suffix)]
    if not any(file.suffix == ".dz" for file in files):
        sys.exit("no corpus: give --corpus FILE, or apt-get install dict-gcide dict-foldoc dict-jargon fortunes")
    words = 0
    with path.open("w") as out:
        for file in files:
            raw = gzip.decompress(file.read_bytes()) if file.suffix == ".dz" else file.read_bytes()
            for article in re.split(r"\n\s*\n|\n%\n", raw.decode("utf-8", "ignore").lower()):
                if (found := re.findall("[a-z]+", article)) and (most is None or words < most):
                    out.write(" ".join(found) + "\n")
                    words += len(found)
    print(f"corpus: {words:,} words of {len(files)} files")
    return path


def write_lines(path: Path, words: list[str], lengths: Iterator[int]) -> None:
    at = 0
    with path.open("w") as out:
        while at < len(words):
            length = next(lengths)
            out.write(" ".join(words[at : at + length]) + "\n")
            at += length


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=None)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--dims", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cbow", action="store_true", help="continuous bag of words, not skip-gram")
    parser.add_argument("--words", type=int, default=None, help="of the default corpus, at most")
    parser.add_argument("--parts", nargs="+", default=["speed", "lines", "quality", "topics"])
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
