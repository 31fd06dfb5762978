"""Word vectors of a folder of text: words, their nearest neighbours, and a picture of them.

python examples/word_vectors.py
python examples/word_vectors.py --text my_folder --words river,king --picture words.png

Without --text it reads the documentation that Python's standard library carries in itself. The vectors are saved in
word2vec's format, which gensim reads, too.
"""

import argparse
import ast
import re
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import manyhands as mh
from manyhands.kernels import WordVectors


def documentation(folder: Path) -> None:
    """A file for each module of the standard library: its docstrings, a paragraph a line."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        paragraphs = re.split(r"\n\s*\n", "\n\n".join(texts).lower())
        lines = [" ".join(re.findall("[a-z]+", paragraph)) for paragraph in paragraphs]
        (folder / f"{path.parent.name}.{path.stem}.txt").write_text("\n".join(filter(None, lines)))


def picture(model: WordVectors, words: list[str], path: Path) -> None:
    """The words and their neighbours in the plane in which they differ most (principal components)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [[word, *(near for near, _ in model.most_similar(word, topn=6))] for word in words]
    rows = np.stack([model.vector(word) for group in groups for word in group])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows - rows.mean(0)
    _, _, components = np.linalg.svd(rows, full_matrices=False)
    points = iter(rows @ components[:2].T)
    figure, axes = plt.subplots(figsize=(8, 6))
    for number, group in enumerate(groups):
        for word in group:
            x, y = next(points)
            axes.plot(x, y, ".", color=f"C{number}")
            axes.annotate(word, (x, y), color=f"C{number}", weight="bold" if word == group[0] else "normal")
    axes.set(title="Words and their nearest neighbours", xlabel="first component", ylabel="second component")
    figure.savefig(path, dpi=120, bbox_inches="tight")


parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a file of text, or a folder of such files")
parser.add_argument("--words", default="file,thread,string,socket", help="whose neighbours are shown")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--picture", type=Path, default=Path("word_vectors.png"))
parser.add_argument("--save", type=Path, default=Path("word_vectors.bin"))
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    if args.text is None:
        documentation(Path(folder))
    task = mh.tasks.word2vec(str(args.text or folder), lower=True, epochs=args.epochs, max_words=20_000)

run = mh.train(task, strategy="hogwild", workers=2)  # two workers write one memory, without locks
print(run.summary())

model = run.model
words = args.words.split(",")
for word in words:
    print(f"{word}: " + ", ".join(f"{near} {cosine:.2f}" for near, cosine in model.most_similar(word, topn=5)))

model.save(args.save, binary=True)
picture(model, words, args.picture)
print(f"saved {args.save} and {args.picture}")
