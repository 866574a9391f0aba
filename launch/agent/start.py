"""What `tc3 agent` checks before its node comes, and what whoever plans an attempt sees to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launch.agent.planning import checkpoint_of, under_way
from launch.resume import checkpoints, data_digest, skipped
from launch.resume.checkpoint_model import check_model
from launch.run import compile_cache, preflight
from launch.run.msrun import check_port
from plugins.operator_fusion import plan as operator_fusion
from plugins.sealed_checkpoint.plan import adopt
from tools.checkpoint.scan import CheckpointInfo
from tools.files.atomic import real_path
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.runs.attempts import Plan, read_attempts
from tools.schema.versions import require_verified


@dataclass
class Start:
    """A run that agents start or join.

    `resume` is what --resume says; `otherwise`, the folder that is given beside `auto`, to begin from while the run has
    saved nothing; `chosen`, what that was found to be.
    """

    recipe: Recipe
    run_dir: Path
    resume: str | None
    otherwise: str | None = None
    chosen: CheckpointInfo | None = None

    @property
    def saves(self) -> Path:
        """Where checkpoints go."""
        return checkpoints.save_path(self.recipe)

    def check(self, slots: int, port: int | None) -> None:
        """What must hold on this node, as `tc3 train` has it; a run that is under way is joined.

        Raises:
            TC3Error: something is to be mended first.
        """
        goes_on = bool(self.resume) or under_way(self.run_dir)
        require_verified()
        preflight.check_machine(self.recipe, slots)
        compile_cache.refuse_own(self.recipe)
        operator_fusion.refuse_other(self.recipe, os.environ)
        preflight.check_sound(self.recipe)
        preflight.check_data(self.recipe)
        if not goes_on:
            checkpoints.check_load_path(self.recipe)
        preflight.check_run_dir(self.run_dir, goes_on, None, self.saves)
        checkpoints.check_save_path(self.saves, goes_on, force=False)
        preflight.check_disk(self.run_dir)
        preflight.check_disk(self.saves)
        if port is not None:
            check_port(port)
        if self.resume not in (None, "auto"):  # `otherwise` may be gone by the time that the run has its own
            checkpoints.one_iteration(str(self.resume))

    def choose(self) -> CheckpointInfo | None:
        """The checkpoint that the run begins from. It is read as a whole: by one node, not by all.

        Raises:
            CheckpointError: that is not whole; or there is none, and the run has gone on from one before.
        """
        if not self.resume:
            return None
        resume, given = self.resume, self.otherwise
        if given and not self._begun_from(given):
            resume = given  # other checkpoints are of a branch that this run leaves
        if resume == "auto":
            adopt(self.saves)
            given = given or checkpoints.beginning(self.run_dir, self.saves)
        unfit = skipped.guilty(self.recipe, self.run_dir)
        self.chosen = checkpoints.find_checkpoint(resume, self.saves, unfit, given)
        if self.chosen is None:
            checkpoints.refuse_scratch(self.run_dir, self.saves)
        return self.chosen

    def _begun_from(self, given: str) -> bool:
        """Whether an attempt has been planned that goes on from the folder `given`."""
        plans = [attempt.plan for attempt in read_attempts(self.run_dir)]
        return any(plan and plan.resume and real_path(plan.resume) == real_path(given) for plan in plans)

    def prepare(self, plan: Plan) -> Recipe:
        """Check the checkpoint that an attempt goes on from; returns the recipe of the attempt."""
        checkpoint = checkpoint_of(plan)
        recipe = apply_overrides(self.recipe, plan.overrides) if plan.overrides else self.recipe
        if checkpoint:
            if self.chosen and checkpoint.path == self.chosen.path:
                check_model(recipe, checkpoint.path)
            checkpoints.keep_cost(recipe, self.run_dir, checkpoint.path)
            checkpoints.check_data_order(recipe, self.run_dir, checkpoint)
        data_digest.keep(recipe, self.run_dir)
        return recipe
