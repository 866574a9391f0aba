"""Corpus and runs that several files read. Each is made once, whichever of pytest's processes needs it first."""

import fcntl
import json
import os
import random
import shutil
import subprocess

import pytest

from tests.training import forked, runs


def documents(count, rng):
    """Text with something to learn: sentences of a small made-up grammar."""
    nouns = ["tensor", "gradient", "expert", "router", "token", "pipeline", "stage", "rank"]
    verbs = ["sends", "reduces", "gathers", "drops", "keeps", "balances"]
    for _ in range(count):
        yield " ".join(
            f"the {rng.choice(nouns)} {rng.choice(verbs)} {rng.randint(0, 999)} {rng.choice(nouns)}s."
            for _ in range(rng.randint(3, 40))
        )


def shared(tmp_path_factory, name, make):
    """The folder that `make(folder)` fills once for all processes of pytest, which only read it."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, made = root / f"shared_{name}", root / f"shared_{name}.made"
    with (root / f"shared_{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed to
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The same small corpus on every machine; returns its prefix."""
    return shared(tmp_path_factory, "corpus", prepare) / "tiny"


def prepare(folder, count=400):
    rng = random.Random(7)
    with (folder / "text.jsonl").open("w") as out:
        for text in documents(count, rng):
            out.write(json.dumps({"text": text}) + "\n")
    command = [runs.TC3, "data", "prepare", "--input", folder / "text.jsonl", "--vocab-size", "512"]
    subprocess.run([*map(str, command), "--output", str(folder / "tiny")], check=True, capture_output=True)


def trained(recipe, corpus, *more):
    """A function that trains `recipe` to the end: the run goes to folder/run, its compiled graph to folder/graph."""

    def make(folder):
        (folder / "graph").mkdir()
        runs.train(recipe, folder / "run", corpus, *more, **runs.compiled_once(folder / "graph"))

    return make


def graph_of(folder, tmp_path_factory):
    """Environment of runs that load the graph of a shared one: from a copy, which nobody else writes."""
    copy = tmp_path_factory.mktemp("graph") / "graph"
    shutil.copytree(folder / "graph", copy)
    return runs.compiled_once(copy)


@pytest.fixture(scope="session")
def tiny(corpus, tmp_path_factory):
    return shared(tmp_path_factory, "tiny", trained(runs.TINY, corpus, *runs.RECORDED))


@pytest.fixture(scope="session")
def whole(tiny):
    """A run of one worker from beginning to end."""
    return tiny / "run"


@pytest.fixture(scope="session")
def graph(tiny, tmp_path_factory):
    """Environment of runs that share the graph of `whole`."""
    return graph_of(tiny, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_dp2(corpus, tmp_path_factory):
    def make(folder):
        (folder / "graph").mkdir()
        cores = runs.train_and_watch(runs.TINY_DP2, folder / "run", corpus, **runs.compiled_once(folder / "graph"))
        (folder / "cores.json").write_text(json.dumps(cores))

    return shared(tmp_path_factory, "tiny_dp2", make)


@pytest.fixture(scope="session")
def whole_dp2(tiny_dp2):
    """The same on two data-parallel workers."""
    return tiny_dp2 / "run"


@pytest.fixture(scope="session")
def graph_dp2(tiny_dp2, tmp_path_factory):
    """Environment of runs that share the graph of `whole_dp2`."""
    return graph_of(tiny_dp2, tmp_path_factory)


@pytest.fixture(scope="session")
def whole_ep2(workers, corpus, tmp_path_factory):
    """Ten steps of two workers that share the experts."""

    def make(folder):
        forked.train(workers, runs.HERE / "tiny_ep2.yaml", folder / "run", corpus, steps=10)

    return shared(tmp_path_factory, "tiny_ep2", make) / "run"
