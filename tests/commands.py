"""Every command that README, the pages and the cards of recipes name, and how each is shown to work.

A page's ```bash block is run by bash, in which every program is a function that writes down its arguments: comments,
arrays, globs, pipes and redirections mean what they mean to a reader. Commands in running text (`tc3 ...`) and the
`how` lines of cards are read word by word. What stands for a reader's own file or folder (`PLACES`) becomes one of a
folder that `tests/test_commands.py` makes. A command that `way_of` does not know fails the test: say there how it is
shown to work.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import click
import yaml

from launch.cli import tc3

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         ROOT / "recipes" / "README.md", ROOT / "benchmarks" / "RESULTS.md"]  # fmt: skip
CARDS = sorted((ROOT / "recipes").glob("*/card.yaml"))
LINKED = ("recipes", "docs", "tests", "tools", "launch", "benchmarks", "plugins")  # of the checkout, in the folder
PROGRAMS = ("tc3", "python", "pytest", "msrun", "bash", "launch/quickstart", "tests/run", "tests/explore", "srun")
_BLOCK = re.compile(r"^```(bash|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
# what ends the command in a card's `how`: a date, what came of it
_AFTER = re.compile(r" on \d{4}-|: |, | at full depth| models its")

# a reader's own things -> those of the folder
PLACES = {
    "RECIPE": "recipes/mini/pretrain.yaml",
    "OTHER_RECIPE": "recipes/mini/pretrain_dp2.yaml",
    "RUN": "output/RUN",
    "CHECKPOINT": "output/RUN/checkpoint/iteration_00000100",
    "A": "output/A/checkpoint", "B": "output/B/checkpoint", "FILE": "hosts.txt",
    "TO": "output/RUN", "NEW": "new", "DIR": "new", "N": "2", "FOLDER": "new", "KILL": "15", "CRD.yaml": "crd.yaml",
    "HUGGING_FACE_FOLDER": "hf", "TOKENIZER_FOLDER": "output/data/stdlib_tokenizer", "INSTANCE.json": "plan_this.json",
    "INSTANCE": "plan_this.json", "NAME": "rms_norm", "PATH": "tests/test_docs.py", "PYTHON": "python",
}  # fmt: skip


JUDGES = (  # commands whose exit code 1 says that something is found
    *("doctor", "check", "recipe diff", "accuracy align", "weights inspect", "memory", "runs watch"),
)


class Command(NamedTuple):
    """A command, and where it stands; `whole`: of a block or a card, where nothing may be left out."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


class Way(NamedTuple):
    """A `Way` says how a test shows that a command works.

    run: in this process, to its end, with exit code 0, or 1 where it judges (`JUDGES`) what the folder has.
    start: in this process, until it starts its long work: a compile, a training, a search, a process of its own.
    by: by the test that is named.
    """

    kind: Literal["run", "start", "by"]
    test: str = ""


RUN, START = Way("run"), Way("start")
# commands of tc3; what is long is run by other tests, each with recipes of its own
_TC3: dict[str, Way] = {
    **dict.fromkeys(("check", "recipe show", "recipe diff", "ep-report", "memory", "affinity", "doctor"), RUN),
    **dict.fromkeys(("data prepare", "data verify", "data imbalance", "data instructions"), RUN),
    **dict.fromkeys(("runs report", "runs watch", "experts report", ""), RUN),
    **dict.fromkeys(("weights inspect", "weights average", "weights convert", "weights reshard"), RUN),
    **dict.fromkeys(("search validate", "search calibrate", "search explain"), RUN),
    **dict.fromkeys(("train", "agent", "dryrun", "prove", "fusion", "generate"), START),
    **dict.fromkeys(("search", "search layout", "search pipeline"), START),
    **dict.fromkeys(("accuracy dump", "accuracy align"), START),
    **dict.fromkeys(("accuracy equivalence", "accuracy collectives"), START),
    **dict.fromkeys(("firsthour", "firsthour read", "firsthour card"), Way("by", "tests/launch/firsthour")),
    "accuracy diagnose": Way("by", "tests/tools/accuracy/diagnose"),
    "accuracy ops": Way("by", "tests/tools/accuracy/operators"),
    "accuracy fusion": Way("by", "tests/tools/accuracy/test_fused_kernels.py"),
    "accuracy compare": Way("by", "tests/tools/accuracy/dumps/test_compare.py"),
    "experts restore-order": Way("by", "tests/tools/experts/test_restore.py"),
}
# words that make another thing of a command, or want what the folder does not have
_WORDS = {
    **dict.fromkeys(("--script", "--slurm", "--volcano"), RUN),
    **dict.fromkeys(("--dry-run", "--against", "--list"), RUN),
    "--probe": START,
    "firsthour.zip": Way("by", "tests/launch/firsthour/test_cli.py"),
    "--bind-file": Way("by", "tests/tools/affinity"),  # wants NPUs
    "executed": Way("by", "tests/training/test_executed.py"),
    "output/mine": Way("by", "tests/launch/run/test_effective.py"),  # wants enough conversations
    "output/profile": Way("by", "tests/tools/search/test_cli.py"),
    "imbalance.svg": Way("by", "tests/tools/data/imbalance"),  # samples of 131,072 tokens
    "hf": Way("by", "tests/tools/weights/test_convert.py"),
    "checkpoint.load_path=hf": Way("by", "tests/training/test_finetune.py"),
    "merge": Way("by", "tests/tools/weights/test_merge.py"),
    **dict.fromkeys(("merged", "checkpoint.load_path=weights"), Way("by", "tests/training/test_public_model.py")),
    "tests/training/sharded_lora_tp2.yaml": START,
    "exported": Way("by", "tests/training/test_generate.py"),
    "output/mini-pretrain_tp2": Way("by", "tests/tools/accuracy/test_collectives.py"),
    "output/RUN/checkpoint_in_order/iteration_00000100": Way("by", "tests/training/test_expert_balance.py"),
}
# all other programs: what each is shown by. A benchmark is also held to its imports and its options, for every one.
_OTHERS = {
    r"launch/quickstart$": Way("by", "tests/test_commands.py::test_the_tour"),
    r"tests/run\b": Way("by", "tests/launch/test_environment.py"),
    r"tests/explore\b": Way("by", "tests/launch/test_environment.py"),
    r"pytest tests/\S+$": Way("by", "tests/test_docs.py::test_paths_that_pages_name_exist"),
    r"python -m tests\.zoo\.run": Way("by", "tests/tools/accuracy/diagnose"),
    r"python -m tools\.accuracy\.together": Way("by", "tests/tools/accuracy/test_together.py"),
    r"python docs/pictures/(ladder|rooms)\.py": Way("by", "tests/test_docs.py"),
    r"python docs/pictures/schedules\.py": Way("by", "tests/tools/pipeline/test_simulate.py"),
    r"python -m launch\.run\.script$": Way("by", "tests/launch/run/test_script.py"),
    r"python -m tests\.tools\.accuracy\.reference\.renew --update$": Way("by", "tests/tools/accuracy/reference"),
    r"python -m tools\.accuracy\.operators\.shipped --update$": Way("by", "tests/tools/accuracy/operators"),
    r"python -m tools\.schema\.extract": Way("by", "tests/tools/test_schema.py"),
    r"python -m tools\.recipe\.catalogue": Way("by", "tests/recipes/test_cards.py"),
    r"python -m tests\.tools\.estimate\.test_version": Way("by", "tests/tools/estimate/test_version.py"),
    r"python -m tests\.tools\.weights\.renew": Way("by", "tests/tools/accuracy/reference/test_torch.py"),
    r"python -m tests\.tools\.prove\.renew": Way("by", "tests/tools/prove/test_faults.py"),
    r"python -m tests\.tools\.fusion\.renew": Way("by", "tests/tools/fusion/test_cluster.py"),
    r"python (-m )?benchmarks[./]": Way("by", "tests/test_commands.py::test_a_benchmark_starts_as_it_is_written"),
    r"bash SCRIPT\b": Way("by", "tests/launch/run/test_script_runs.py"),
    r"bash benchmarks/\S+\.sh": Way("by", "tests/test_repository.py"),
    r"msrun --worker_num=1 .* launch/train\.py --config recipes/mini/pretrain\.yaml$": Way(
        "by", "tests/training/test_workers.py"
    ),
    r"python -m launch\.run\.cores$": Way("by", "tests/launch/run/test_cores.py"),
    r"msrun --bind_numa \S+$": Way("by", "tests/launch/run/test_cores.py"),
    r"python -c ": Way("by", "tests/tools/fusion/test_cluster.py"),
    r"srun --": Way("by", "tests/launch/agent/test_cluster.py"),
}  # fmt: skip


def way_of(words: tuple[str, ...]) -> Way | None:
    """Return how a test shows that a command works; return None if no entry of the tables names the command."""
    if words[0] != "tc3":
        text = " ".join(words)
        return next((way for pattern, way in _OTHERS.items() if re.match(pattern, text)), None)
    leaf, rest = leaf_of(words)
    if leaf == "doctor" and "hosts.txt" in rest:
        return START
    if leaf == "affinity" and "--root" in rest:
        return Way("by", "tests/tools/affinity")
    special = next((_WORDS[word] for word in rest if word in _WORDS), None)
    return special or _TC3.get(leaf)


def leaf_of(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(``"data prepare"``, the words behind it); ``"search"`` where its recipe follows."""
    command: click.Command = tc3
    names: list[str] = []
    rest = words[1:]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            break
        command, names, rest = found, [*names, rest[0]], rest[1:]
    return " ".join(names), rest


def commands(folder: Path) -> list[Command]:
    """All of them, each text once; files that blocks write by redirection are left in `folder`."""
    found = [each for page in PAGES for each in _of_page(page, folder)]
    for card in CARDS:
        for words in _of_card(card):  # `tc3 dryrun --quick` there means the card's recipe
            whole = words[0] != "tc3" or any(word.startswith("recipes/") for word in words)
            found.append(Command(str(card.relative_to(ROOT)), words, whole))
    found.sort(key=lambda each: not each.whole)
    return list({each.words: each for each in reversed(found)}.values())[::-1]


def _of_page(page: Path, folder: Path) -> Iterator[Command]:
    name, text = str(page.relative_to(ROOT)), page.read_text("utf-8")
    for language, block in _BLOCK.findall(text):
        lines = block if language else "\n".join(line for line in block.splitlines() if line.startswith(PROGRAMS))
        for words in _of_bash(lines, folder):
            yield Command(name, placed(words), True)
    for inline in _INLINE.findall(_BLOCK.sub("", text)):
        if (words := _words(inline))[:1] and words[0] in PROGRAMS and len(words) > 1 and "..." not in words[-1]:
            yield Command(name, placed(words), False)


def _words(text: str) -> list[str]:
    """Of a command in running text: `NAME|all` is two choices, of which the first is taken."""
    try:
        return shlex.split(re.sub(r"(\w)\|\w+", r"\1", text).split(" > ")[0].replace("...", ""))
    except ValueError:  # a quotation mark of its own: no command
        return []


def _of_card(card: Path) -> Iterator[tuple[str, ...]]:
    content = yaml.safe_load(card.read_text("utf-8"))
    for recipe in content["recipes"].values():
        for status in recipe["status"]:
            for part in status["how"].split(";"):
                words = shlex.split(_AFTER.split(part.strip())[0].replace("'", ""))
                if words and words[0] in PROGRAMS and not (words[0] == "tc3" and len(words) < 3):
                    yield placed(words)


def placed(words: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """With the folder's things in the place of a reader's: the first part of a path, or what KEY= is set to."""
    places = {**PLACES, **({"RECIPE": "recipes/mini/pretrain_tp2.yaml"} if "collectives" in words else {})}
    places |= {"NAME": "zero_bubble_v"} if "--schedule" in words else {}
    found = []
    for word in words:
        key, equals, value = word.rpartition("=")
        first, *more = value.split("/")
        found.append(f"{key}{equals}{'/'.join([places.get(first, first), *more])}")
    return tuple(found)


def _of_bash(block: str, folder: Path) -> list[list[str]]:
    """The commands that bash would run; programs are functions, which write down their words."""
    for program in PROGRAMS:
        if "/" in program:  # bash looks for no function of such a name
            block = re.sub(rf"(?m)^{program}\b", program.replace("/", "__"), block)
    functions = [f'{program.replace("/", "__")}() {{ _note {program} "$@"; }}' for program in PROGRAMS]
    functions += ['srun() { "$@"; }', 'bash() { command bash "$@"; }', "source() { :; }"]
    note = '_note() { printf "%s\\0" "$@" >> "$NOTED"; printf "\\n\\0" >> "$NOTED"; }'
    exported = "export -f _note " + " ".join(program.replace("/", "__") for program in PROGRAMS)
    noted = folder / ".noted"
    noted.write_bytes(b"")
    script = "\n".join([note, *functions, exported, block])
    tools = folder / ".tools"  # of other programs none is run: a block that names one fails here
    tools.mkdir(exist_ok=True)
    for name in ("bash", "cat", "mkdir"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(shutil.which(name) or name)
    environment = {"PATH": str(tools), "NOTED": str(noted)}
    subprocess.run(["bash", "-eu", "-c", script], cwd=folder, check=True, env=environment)
    found: list[list[str]] = [[]]
    for word in noted.read_bytes().decode().split("\0")[:-1]:
        if word == "\n":
            found.append([])
        else:
            found[-1].append(word)
    return found[:-1]


@cache
def linked(folder: Path) -> Path:
    """`folder`, with links to the checkout's folders."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "reports").mkdir()
    return folder
