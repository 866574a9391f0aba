"""Run a worker with the fault of sitecustomize.py in a fork, whose start has not imported that.

python worker.py FILE ...
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import sitecustomize  # noqa: F401

sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
