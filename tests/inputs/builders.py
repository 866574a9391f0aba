"""Files of the tables that are too large or too binary to stand in them: each builder fills a row's folder."""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from tests.tools.checkpoint.saved import of_two_ranks
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus
from tools.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
TEXTS = [
    f"Document {number}: {'the quick brown fox jumps over the lazy dog. ' * (number % 7 + 1)}" for number in range(40)
]


def jsonl(folder: Path) -> None:
    """corpus.jsonl: 40 documents."""
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def corpus(folder: Path) -> None:
    """corpus.jsonl, and c.bin, c.idx, c.json, c_tokenizer made of it."""
    _prepared(folder, "c", 0.0)


def _prepared(folder: Path, prefix: str, held_out: float) -> None:
    """Write what `tc3 data prepare` makes of corpus.jsonl; it is made once a process."""
    made, files = _made(prefix, held_out)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(made.encode(), str(folder).encode()))  # a sidecar names its sources


@cache
def _made(prefix: str, held_out: float) -> tuple[str, dict[str, bytes]]:
    """Return the folder in which a corpus was prepared, and the files that were made there."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        jsonl(folder)
        source = Corpus((str(folder / "corpus.jsonl"),))
        prepare(PrepareOptions(source, folder / prefix, vocab_size=300, held_out=held_out, seed=3))
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return made, files


def truncated_gz(folder: Path) -> None:
    """cut.jsonl.gz: ends in the middle."""
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode())
    (folder / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])


def truncated_bin(folder: Path) -> None:
    """A corpus whose c.bin lacks its last bytes."""
    _cut(folder, "c.bin", -7)


def truncated_idx(folder: Path) -> None:
    """A corpus whose c.idx lacks its last bytes."""
    _cut(folder, "c.idx", -5)


def header_only_idx(folder: Path) -> None:
    """A corpus whose c.idx ends inside its header."""
    _cut(folder, "c.idx", 20)


def flipped_bin(folder: Path) -> None:
    """A corpus with one bit of c.bin turned."""
    _flip(folder, "c.bin", 100)


def flipped_lengths(folder: Path) -> None:
    """A corpus with one bit of the first document's length turned."""
    _flip(folder, "c.idx", 34)


def flipped_offsets(folder: Path) -> None:
    """A corpus with one bit of an offset turned."""
    _flip(folder, "c.idx", 34 + 40 * 4 + 9)


def _cut(folder: Path, name: str, end: int) -> None:
    corpus(folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:end])


def _flip(folder: Path, name: str, at: int) -> None:
    corpus(folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def deep_yaml(folder: Path) -> None:
    """deep.yaml: a list in a list in a list, 5,000 of them."""
    (folder / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000 + "\n")


def alias_bomb(folder: Path) -> None:
    """bomb.yaml: ten anchors, each nine times the one before: a billion values by name, a few hundred in truth."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (folder / "bomb.yaml").write_text("\n".join(lines) + "\n")


def deep_json(folder: Path) -> None:
    """deep.json: a line of 100,000 open brackets."""
    (folder / "deep.json").write_text("[" * 100_000 + "\n")


def corpus_of_mini(folder: Path) -> None:
    """The corpora that recipes/mini reads: output/data/stdlib and its held-out part."""
    _prepared(folder, "output/data/stdlib", 0.3)


def checkpoint_of_mini(folder: Path) -> None:
    """saved/iteration_00000004: what two ranks save of recipes/mini/pretrain.yaml, unsealed."""
    of_two_ranks(folder / "saved" / "iteration_00000004", load_recipe(ROOT / "recipes" / "mini" / "pretrain.yaml"))


def checkpoint_without_experts(folder: Path) -> None:
    """The same, without the file of the second rank, which has half of the experts."""
    checkpoint_of_mini(folder)
    _second(folder).unlink()


def cut_checkpoint(folder: Path) -> None:
    """The same, that file without its last bytes."""
    checkpoint_of_mini(folder)
    _second(folder).write_bytes(_second(folder).read_bytes()[:-9])


def _second(folder: Path) -> Path:
    return folder / "saved" / "iteration_00000004" / "mini-model-0000001-0000002.safetensors"


def cut_corpus_of_mini(folder: Path) -> None:
    """The same, its .bin without its last half."""
    corpus_of_mini(folder)
    path = folder / "output" / "data" / "stdlib.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def corpus_of_large_ids(folder: Path) -> None:
    """A corpus whose tokenizer has an id past 65,535."""
    corpus(folder)
    path = folder / "c_tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["~~~"] = 70_000
    path.write_text(json.dumps(content))


def corpus_without_end(folder: Path) -> None:
    """A corpus whose tokenizer says nothing of an end of document."""
    corpus(folder)
    path = folder / "c_tokenizer" / "tokenizer_config.json"
    content = json.loads(path.read_text())
    del content["eos_token"]
    path.write_text(json.dumps(content))


def corpus_without_bin(folder: Path) -> None:
    """A corpus without c.bin."""
    corpus(folder)
    (folder / "c.bin").unlink()


def corpus_without_idx(folder: Path) -> None:
    """A corpus without c.idx."""
    corpus(folder)
    (folder / "c.idx").unlink()


def empty_idx(folder: Path) -> None:
    """A corpus whose c.idx holds nothing."""
    _cut(folder, "c.idx", 0)


def boasting_idx(folder: Path) -> None:
    """A corpus whose c.idx counts 2**62 documents."""
    corpus(folder)
    path = folder / "c.idx"
    content = path.read_bytes()
    path.write_bytes(content[:18] + struct.pack("<QQ", 1 << 62, (1 << 62) + 1) + content[34:])


def negative_length(folder: Path) -> None:
    """A corpus whose first document has -5 tokens."""
    corpus(folder)
    path = folder / "c.idx"
    content = path.read_bytes()
    path.write_bytes(content[:34] + struct.pack("<i", -5) + content[38:])


def empty_sidecar(folder: Path) -> None:
    """A corpus whose c.json holds nothing."""
    _cut(folder, "c.json", 0)


def binary_sidecar(folder: Path) -> None:
    """A corpus whose c.json is binary."""
    corpus(folder)
    (folder / "c.json").write_bytes(b"\xff\x00\xff")


def foreign_sidecar(folder: Path) -> None:
    """A corpus with somebody else's c.json."""
    corpus(folder)
    (folder / "c.json").write_text('{"format": "theirs"}')


def short_sidecar(folder: Path) -> None:
    """A corpus whose c.json lacks most keys."""
    corpus(folder)
    (folder / "c.json").write_text('{"format": "tc3-data-1", "documents": 40}')


def odd_sidecar(folder: Path) -> None:
    """A corpus whose c.json says a word where its sources are."""
    corpus(folder)
    path = folder / "c.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sources": "corpus.jsonl"}))


def slow_text(folder: Path) -> None:
    """slow.txt: 6 MB of words that are all different, of which a large vocabulary takes a minute to learn."""
    random = np.random.default_rng(0)
    letters = random.integers(97, 123, 6_000_000, dtype=np.uint8)
    letters[random.integers(0, len(letters), len(letters) // 12)] = 32  # blanks
    (folder / "slow.txt").write_bytes(letters.tobytes())


def dumps_without_tensors(folder: Path) -> None:
    """Dumps a and b of one call, whose .npy files are not there."""
    tensor = {"type": "mindspore.Tensor", "dtype": "Float32", "shape": [2], "data_name": "gone.npy"}
    tensor |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), 1.0)
    call = {"input_args": [tensor], "input_kwargs": {}, "output": [tensor]}
    content = {"level": "L0", "task": "tensor", "data": {"Cell.layer.Dense.forward.0": call}}
    for name in ("a", "b"):
        rank = folder / name / "step0" / "rank0"
        rank.mkdir(parents=True)
        (rank / "dump.json").write_text(json.dumps(content))


def checkpoints(folder: Path) -> None:
    """a, b: iterations of two ranks, sealed; wide: of four; cut: with half a file; nan: with a number that is none;
    lora: with an adapter.
    """
    from plugins.sealed_checkpoint.plan import write_seal
    from tests.tools.checkpoint.saved import Saved, numbered

    for name, ranks in (("a", 2), ("b", 2), ("wide", 4), ("cut", 2), ("nan", 2), ("lora", 2)):
        saved = Saved(folder / name / "iteration_00000002", ranks)
        whole = numbered(4, 2) * (np.nan if name == "nan" else 1)
        saved.put("linear.weight", whole, (ranks, 1), [[rank] for rank in range(ranks)])
        if name == "lora":
            saved.put("linear.lora_A.weight", numbered(1, 2), (1, 1), [[0, 1]])
        path = saved.write()
        for rank in range(ranks):
            write_seal(path, rank, ranks, 2)
    file = next((folder / "cut").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def no_metadata(folder: Path) -> None:
    """The metadata.json of b, which hold nothing."""
    (folder / "b" / "iteration_00000002" / "metadata.json").write_text("")


def weights_of_mini(folder: Path) -> None:
    """w: weights of the mini that nobody has trained, with a tokenizer beside them."""
    from safetensors.numpy import save_file

    from tests.inputs.rows import ROOT
    from tools.accuracy.reference.start import initial_weights
    from tools.data.tokenizer import train
    from tools.recipe.load import load_recipe
    from tools.weights.convert_plan import model_of
    from tools.weights.hugging_face_names import to_mindformers

    sizes = model_of(load_recipe(ROOT / "recipes" / "mini" / "pretrain.yaml"))
    train(["def read(self):"], 300, folder / "w")
    save_file(
        to_mindformers(initial_weights(sizes, 0), sizes), folder / "w" / "weights-model-0000000-0000001.safetensors"
    )
