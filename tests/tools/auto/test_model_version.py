import pytest

from tools.auto.layout_file import MODEL_VERSION
from tools.auto.resolve import resolve
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory_model import all_stages
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.recipe.load import load_recipe

# when these change, launches must not take layouts that an older model chose: raise MODEL_VERSION, and write it and
# the new numbers here (GiB of each stage, seconds of a step)
VERSION = 4
PREDICTED = {
    "telechat3_438b/pretrain_4k.yaml": [32.993, 32.764, 32.53, 32.295, 32.022, 31.709, 31.397, 27.639, 36.9927],
    "telechat3_105b/pretrain_4k.yaml": [14.555, 16.481, 16.451, 16.422, 16.393, 18.883, 18.848, 8.234, 20.0412],
    "telechat3_105b/context_128k.yaml": [24.457, 28.029, 27.794, 32.06, 66.1121],
    "telechat3_438b/context_32k.yaml": [30.584, 31.934, 31.7, 31.465, 31.192, 30.879, 30.567, 26.297, 115.2263],
    "telechat3_438b/context_128k.yaml": [29.852, 31.992, 31.757, 31.523, 31.25, 30.937, 30.625, 29.364, 300.0617],
}


def predicted(file):
    config = from_recipe(resolve(load_recipe(f"recipes/{file}")))
    step = TimeModel(cluster("atlas_800t_a2")).step(config).total
    return [*(round(float(memory.peak) / GIB, 3) for memory in all_stages(config)), round(step, 4)]


@pytest.mark.parametrize("file", PREDICTED)
def test_a_changed_model_has_another_version(file):
    assert VERSION == MODEL_VERSION
    assert predicted(file) == pytest.approx(PREDICTED[file], rel=1e-3), "raise MODEL_VERSION in tools.auto.layout_file"
