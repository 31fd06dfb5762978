"""gensim's side of benchmarks/word2vec.py, which starts this file by an interpreter that has gensim (`--peer-python`).

    python word2vec_peer.py CORPUS OUT --dim 100 --workers 2 --epochs 5 --seed 0

Trains gensim's Word2Vec by its fastest way (`corpus_file`), writes the vectors to OUT and prints one line of JSON: wall and CPU
seconds of training alone, versions, and where gensim's test data lie. It imports nothing of manyhands.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

from gensim.models import Word2Vec
from gensim.test.utils import datapath


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("out")
    for name, default in (("dim", 100), ("workers", 2), ("epochs", 5), ("seed", 0), ("cbow", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = Word2Vec(
        vector_size=args.dim,
        workers=args.workers,
        epochs=args.epochs,
        seed=args.seed,
        sg=1 - args.cbow,
        alpha=0.05 if args.cbow else 0.025,
        window=5,
        negative=5,
        sample=1e-3,
        min_count=5,
    )
    model.build_vocab(corpus_file=args.corpus)
    wall, cpu = time.perf_counter(), time.process_time()
    words, examples = model.corpus_total_words, model.corpus_count
    model.train(corpus_file=args.corpus, total_words=words, total_examples=examples, epochs=args.epochs)
    result = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "version": version("gensim"),
        "test_data": datapath(""),
    }
    model.wv.save_word2vec_format(args.out, binary=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
