"""Draw docs/pictures/runs.svg, the time line of docs/runs.md, of made-up runs: `python docs/pictures/runs.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_suffix(".svg")
sys.path.insert(0, str(FILE.parents[2]))

from tests.tools.runs.builders import Builder  # noqa: E402
from tools.runs.render import draw  # noqa: E402
from tools.runs.study import study  # noqa: E402


def main() -> None:
    """Build both runs in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Builder(Path(folder) / "two failures", 240)
        broken.plan()
        broken.train(87, every=20, save=15, evaluation=60)
        broken.kill(60)
        broken.plan(wait=80)
        broken.train(133, compiling=80, every=20, save=15)
        broken.kill(250, host=0, cause="hang")
        broken.plan(wait=80)
        broken.train(240, compiling=80, every=20, save=15)
        broken.done()
        sound = Builder(Path(folder) / "no failure", 240)
        sound.plan()
        sound.train(240, every=20, save=15, evaluation=60)
        sound.done()
        draw([study(one.built.folder) for one in (broken, sound)], FILE)


if __name__ == "__main__":
    main()
