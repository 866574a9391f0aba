"""Folders of runs as `tc3 train` with plugins.step_record writes them, of a model of three weights and one router that
NumPy trains with AdamW; a fault is a change of one function of `Run`.
"""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np

from plugins.step_record.plan import Adam, gradient_square, record_file, samples_of, state_of, update_of
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

TINY = load_recipe(Path(__file__).parents[3] / "training" / "tiny.yaml")
ROUTER, EXPERTS = "decoder.layers.1.mlp.router", 4
SHAPES = {
    "embedding.word_embeddings.weight": (8, 6),
    "decoder.layers.0.mlp.linear_fc1.weight": (6, 4),
    "decoder.layers.0.input_layernorm.weight": (6,),
}
BETAS, EPS, DECAY, LIMIT, RATE = (0.9, 0.95), 1e-8, 0.1, 0.5, 0.001


def but(kind=None, **methods):
    """Return a class of runs with other methods: each gets what the one of `kind` returns, then its arguments."""
    kind = kind or Run

    def changed(name, change):
        return lambda self, *given: change(getattr(kind, name)(self, *given), *given)

    return type("Fault", (kind,), {name: changed(name, change) for name, change in methods.items()})


class Run:
    """Trains, and writes what is recorded. `ranks` of tensor parallelism split the matrices along their first axis.

    A test replaces a method, or gives `keys`: changes of the recipe by dotted path.
    """

    def __init__(self, folder, steps=3, ranks=1, keys=None, resumed_from=0):
        self.folder, self.last, self.ranks, self.begin = folder, steps, ranks, resumed_from
        self.recipe = deepcopy(TINY)
        self.recipe["plugins"]["step_record"] = {"steps": max(1, steps - resumed_from)}
        if ranks > 1:
            self.recipe |= {"use_parallel": True}
            self.recipe["parallel"]["parallel_mode"] = 1
            self.recipe["parallel_config"]["model_parallel"] = ranks
        for path, value in (keys or {}).items():
            *above, name = path.split(".")
            section = self.recipe
            for key in above:
                section = section[key]
            section[name] = value

    def start(self):
        rng = np.random.default_rng(0)
        return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}

    def gradient(self, step, name):
        made = np.random.default_rng(step * 100 + list(SHAPES).index(name)).normal(0, 1, SHAPES[name])
        return made.astype(np.float32)

    def norm(self, gradients):
        return float(np.sqrt(sum(np.square(each).sum() for each in gradients.values())))

    def rate(self, step):
        return 1e-3 * (step - 1)

    def rate_used(self, step):
        return self.rate(step)

    def decay(self, name):
        return DECAY if len(SHAPES[name]) > 1 else 0.0

    def loss(self, step):
        return 6.0 - 0.1 * step

    def aux(self, step):
        return 1.0

    def software(self):
        return {"mindspore": "2.9.0", "mindformers": "1.9.0"}

    def batch(self, step):
        return np.arange(8).reshape(2, 4) + 100 * step, np.ones((2, 4), np.int32)

    def load(self, step):
        return np.random.default_rng(step).dirichlet(np.ones(EXPERTS)).astype(np.float32)

    def move(self, load):
        return RATE * np.sign(1 / EXPERTS - load)

    def restored(self, state):
        """Return the state with which a resumed run starts, made from the state of the step from which it continues."""
        return state

    def copy(self, rank, name, value):
        """A rank's copy of what is not split."""
        return value

    def write(self):
        (self.folder / "metrics").mkdir(parents=True)
        dump_recipe(self.recipe, self.folder / "recipe.yaml")
        state = {**self.start(), f"{ROUTER}.expert_bias": np.zeros(EXPERTS, np.float32)}
        for moment in ("adam_m.", "adam_v."):
            state |= {moment + name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for step in range(1, self.begin + 1):
            state = self.step(step, state, recorded=False)
        if self.begin:
            state = self.restored(state)
        for rank in range(self.ranks):
            line = {"step": self.begin, "start": True, "effective": {}}
            self.line(rank, "start", line | self.of_rank(rank, state))
            self.metrics(
                rank,
                {
                    "total_steps": self.last,
                    "start_step": self.begin,
                    "world_size": self.ranks,
                    "time": 1e9,
                    "software": self.software(),
                    "held_bytes": {"weight": 320, "state": 640},
                },
            )
        for step in range(self.begin + 1, self.last + 1):
            state = self.step(step, state)
        return self.folder

    def step(self, step, before, recorded=True):
        gradients = {name: self.gradient(step, name) for name in SHAPES}
        norm = self.norm(gradients)
        factor = min(1.0, LIMIT / norm)
        after, rate = dict(before), self.rate_used(step)
        for name, each in gradients.items():
            first = BETAS[0] * before[f"adam_m.{name}"] + (1 - BETAS[0]) * factor * each
            second = BETAS[1] * before[f"adam_v.{name}"] + (1 - BETAS[1]) * (factor * each) ** 2
            root = np.sqrt(second / (1 - BETAS[1] ** step)) + EPS
            kept = before[name] * (1 - rate * self.decay(name))
            after[name] = (kept - rate * first / (1 - BETAS[0] ** step) / root).astype(np.float32)
            after[f"adam_m.{name}"], after[f"adam_v.{name}"] = first.astype(np.float32), second.astype(np.float32)
        load = self.load(step)
        after[f"{ROUTER}.expert_bias"] = (before[f"{ROUTER}.expert_bias"] + self.move(load)).astype(np.float32)
        adam = Adam(self.rate(step), *BETAS, EPS, step)
        for rank in range(self.ranks if recorded else 0):
            self.record(rank, step, before, after, adam, load, norm)
        return after

    def record(self, rank, step, before, after, adam, load, norm):
        old, new = (self.cut(rank, side) for side in (before, after))
        weights = {}
        for name in SHAPES:
            first, second = new[f"adam_m.{name}"], new[f"adam_v.{name}"]
            told = update_of(old[name], new[name], first, second, adam)
            told["gradient"] = gradient_square(first, old[f"adam_m.{name}"], adam.beta1)
            weights[name] = told | {"dimensions": len(SHAPES[name])}
        line = {"step": step, "learning_rate": self.rate(step), "updates": step, "parts": self.parts(rank)}
        line |= {"weights": weights, "loads": {ROUTER: load.tolist()}}
        self.line(rank, "step", line | self.of_rank(rank, after))
        rows = samples_of(("input_ids", "loss_mask"), self.batch(step))
        losses = {"loss": self.loss(step), "lm_loss": self.loss(step), "load_balancing_loss": self.aux(step)}
        numbers = {"mtp_loss": None, "global_norm": norm, "learning_rate": self.rate(step), "overflow": False}
        speed = {"time": 1e9 + step, "tokens": 8, "seconds": 0.5, "cpu_seconds": 0.4}
        self.metrics(rank, {"step": step, **losses, **numbers, **speed, "samples": rows})

    def cut(self, rank, state):
        found = {}
        for name, value in state.items():
            if self.ranks > 1 and value.ndim > 1:
                found[name] = np.split(value, self.ranks)[rank]
            else:
                found[name] = self.copy(rank, name, value)
        return found

    def of_rank(self, rank, state):
        biases = {ROUTER: state[f"{ROUTER}.expert_bias"].tolist()}
        return {"biases": biases, "state": state_of(self.cut(rank, state))}

    def parts(self, rank):
        if self.ranks == 1:
            return {}
        names = {prefix + name: shape for name, shape in SHAPES.items() for prefix in ("", "adam_m.", "adam_v.")}
        return {name: [list(shape), [rank if len(shape) > 1 else 0]] for name, shape in names.items()}

    def line(self, rank, _, line):
        with record_file(self.folder, rank).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self, rank, line):
        with (self.folder / "metrics" / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
