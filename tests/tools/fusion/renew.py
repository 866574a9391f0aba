"""Ask the installed MindSpore's passes anew and write tests/tools/fusion/answers/.

python -m tests.tools.fusion.renew [random]     random graphs: some minutes
python -m tests.tools.fusion.renew NAME FOLDER  a training graph that was compiled into FOLDER (see docs/fusion.md)
"""

import sys
import tempfile
from pathlib import Path

from tests.tools.fusion import answers, random_graphs
from tests.tools.fusion.oracle import ask, read_answers


def of_seeds(seeds, folder):
    """{seed: answer}; the answer to a cell is the first graph of its folder."""
    ask(Path(random_graphs.__file__), folder, list(map(str, seeds)))
    return {seed: read_answers(folder / str(seed))[0] for seed in seeds}


def main():
    """Renew one file."""
    if len(sys.argv) == 3:
        found = read_answers(Path(sys.argv[2]))
        answers.write(f"{sys.argv[1]}.jsonl.gz", dict(enumerate(found)))
        return
    with tempfile.TemporaryDirectory() as folder:
        answers.write("random.jsonl.gz", of_seeds(random_graphs.SEEDS, Path(folder)))


if __name__ == "__main__":
    main()
