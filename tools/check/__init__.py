"""`tc3 check`: prove without a device that a recipe is one that MindFormers will run as it is written."""

from tools.check.check import check_recipe
from tools.recipe.findings import Finding, Report

__all__ = ["Finding", "Report", "check_recipe"]
