import json
import random
import subprocess

import pytest

from tests.training import runs


def documents(count, rng):
    """Text with something to learn: sentences of a small made-up grammar."""
    nouns = ["tensor", "gradient", "expert", "router", "token", "pipeline", "stage", "rank"]
    verbs = ["sends", "reduces", "gathers", "drops", "keeps", "balances"]
    for _ in range(count):
        yield " ".join(
            f"the {rng.choice(nouns)} {rng.choice(verbs)} {rng.randint(0, 999)} {rng.choice(nouns)}s."
            for _ in range(rng.randint(3, 40))
        )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The same small corpus on every machine; returns its prefix."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    with (folder / "text.jsonl").open("w") as out:
        for text in documents(400, rng):
            out.write(json.dumps({"text": text}) + "\n")
    prefix = folder / "tiny"
    command = [runs.TC3, "data", "prepare", "--input", folder / "text.jsonl", "--vocab-size", "512"]
    subprocess.run([*map(str, command), "--output", str(prefix)], check=True, capture_output=True)
    return prefix


@pytest.fixture(scope="session")
def graph(tmp_path_factory):
    """Environment of runs that share the graph of `whole`."""
    return runs.compiled_once(tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="session")
def whole(corpus, graph, tmp_path_factory):
    """A run of one worker from beginning to end."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    runs.train(runs.TINY, run_dir, corpus, **graph)
    return run_dir


@pytest.fixture(scope="session")
def graph_dp2(tmp_path_factory):
    """Environment of runs that share the graph of `whole_dp2`."""
    return runs.compiled_once(tmp_path_factory.mktemp("graph_dp2"))


@pytest.fixture(scope="session")
def whole_dp2(corpus, graph_dp2, tmp_path_factory):
    """The same on two data-parallel workers."""
    run_dir = tmp_path_factory.mktemp("whole_dp2") / "run"
    runs.train(runs.TINY_DP2, run_dir, corpus, **graph_dp2)
    return run_dir
