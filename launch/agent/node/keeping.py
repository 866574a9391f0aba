"""Keep what the workers have compiled, beside them: in a thread of its own, for copies take as long as they take."""

from __future__ import annotations

import threading

from launch.run.compile_cache import CompileCache

LOOK = 2.0  # seconds


class Keeping(threading.Thread):
    """Publishes the graphs of `cache` once they are in use, as a context around the workers; `well`: they ended so."""

    def __init__(self, cache: CompileCache):
        super().__init__(daemon=True, name="keeping")
        self.cache, self.well = cache, False
        self._over = threading.Event()

    def __enter__(self) -> Keeping:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()
        self.cache.close(self.well)

    def run(self) -> None:
        """Until the workers have ended."""
        while self.cache.environment and not self._over.wait(LOOK):
            self.cache.keep()
