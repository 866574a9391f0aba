from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindformers import MindFormerConfig
from mindspore import Tensor

from plugins.cpu_backend import adapter
from plugins.cpu_backend.layers import GroupedMatMul
from plugins.cpu_backend.plan import (
    block_count,
    default_block,
    documents_apart,
    grouped_matmul,
    grouped_matmul_dw,
    grouped_matmul_dx,
)
from plugins.errors import RecipeError
from tools.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config():
    return MindFormerConfig(str(ROOT / "recipes/mini/pretrain.yaml"))


def test_points_the_recipe_at_the_cpu_classes(config):
    adapter.enable(config)
    assert config.model.model_config.architectures == ["CpuTeleChat3MoeForCausalLM"]
    assert config.runner_wrapper.type == "CpuTrainOneStepCell"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context.mode", 1),
        ("runner_config.sink_mode", True),
        ("runner_wrapper.type", "MFPipelineWithLossScaleCell"),
        ("runner_wrapper.use_clip_grad", False),
        ("model.model_config.compute_dtype", "bfloat16"),
        ("model.model_config.fused_norm", True),
        ("model.model_config.hidden_act", "fusedswiglu"),
        ("model.model_config.architectures", ["LlamaForCausalLM"]),
        ("parallel.parallel_mode", 1),
        ("parallel_config.model_parallel", 2),
        ("parallel_config.expert_parallel", 4),
    ],
)
def test_names_the_key_that_cpu_cannot_execute(config, key, value):
    config.set_value(key, value)
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        adapter.enable(config)


INERT = """
import sys, tempfile
from pathlib import Path
import mindformers
from launch import train
reached, left = [], []
mindformers.build_context = lambda config: left.append(tempfile.mkstemp()[1])
mindformers.Trainer = lambda config: type("T", (), {"train": lambda self: reached.append(config)})()
recipe = train.load_recipe("recipes/mini/pretrain.yaml")
recipe["context"]["device_target"] = TARGET
recipe["plugins"] = {}  # its held-out corpus is not here in a clean checkout
train.train(recipe)
loaded = [name for name in sys.modules if name.startswith("plugins.cpu_backend.adapter")]
print(len(reached), bool(loaded), reached[0].model.model_config.architectures[0], Path(left[0]).exists())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expected"),
    [("Ascend", "1 False TeleChat3MoeForCausalLM False"), ("CPU", "1 True CpuTeleChat3MoeForCausalLM False")],
)
def test_the_device_target_alone_switches_it(forks, target, expected):
    code = INERT.replace("TARGET", repr(target))
    done = forks.python("-c", code)
    assert done.stdout.strip().splitlines()[-1] == expected, done.stderr[-2000:]


def test_the_recipe_file_itself_stays_stock():
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    assert recipe["model"]["model_config"]["architectures"] == ["TeleChat3MoeForCausalLM"]
    assert recipe["runner_wrapper"]["type"] == "MFTrainOneStepCell"


@pytest.mark.parametrize(
    ("loader", "apart"),
    [
        ({"config": {"reset_attention_mask": True, "create_attention_mask": True}}, True),
        ({"config": {"reset_attention_mask": False}}, False),
        ({"type": "HFDataLoader", "handler": [{"type": "PackingHandler"}]}, True),
        ({"type": "HFDataLoader", "handler": [{"type": "AlpacaInstructDataHandler"}]}, False),
        ({"type": "HFDataLoader"}, False),
    ],
)
def test_documents_and_packed_conversations_are_kept_apart(loader, apart):
    assert documents_apart(loader) is apart


def test_the_installed_versions_still_hold_every_patched_line():
    from mindspore.communication import comm_func

    adapter.after_context()
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    for patched in (callback._get_separate_loss, sharded_tensor.get_strategy_metadata):
        assert patched.tc3_patch
    before = comm_func.barrier
    adapter.before_mindformers(distributed=False)
    assert comm_func.barrier is before, "one process keeps MindSpore's own barrier"


counts_per_expert = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda counts: sum(counts) > 0)


@pytest.mark.slow
@given(counts_per_expert)
@settings(max_examples=40)
def test_every_row_has_one_slot_in_a_block_of_its_expert(counts):
    ends, rows = np.cumsum(counts), sum(counts)
    block, layout = default_block(rows, len(counts)), GroupedMatMul(len(counts)).layout(Tensor(ends, ms.int32), rows)
    expert_of_block, source, slot_of_row = (each.asnumpy() for each in layout)

    assert len(set(slot_of_row.tolist())) == rows, "two rows share a slot"
    np.testing.assert_array_equal(source.reshape(-1)[slot_of_row], np.arange(rows))
    expert_of_row = np.repeat(np.arange(len(counts)), counts)
    np.testing.assert_array_equal(expert_of_block[slot_of_row // block], expert_of_row)


@given(counts_per_expert, st.sampled_from([1, 3, 8, 16]))
def test_the_static_number_of_blocks_is_enough_and_no_more_than_one_per_expert_over(counts, block):
    needed = sum(-(-count // block) for count in counts)
    assert needed <= block_count(sum(counts), len(counts), block) <= sum(counts) / block + len(counts)


def test_work_follows_the_tokens_not_the_experts():
    rows, experts = 4096, 64
    block = default_block(rows, experts)
    padded = block_count(rows, experts, block) * block
    assert padded <= 1.6 * rows, "the prototype's block-diagonal form multiplies 64 x rows"


def test_default_block_is_a_power_of_two_within_bounds():
    for rows in (1, 7, 100, 4096, 10**6):
        block = default_block(rows, 16)
        assert block in (8, 16, 32, 64, 128)


@given(counts_per_expert, st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_grouped_matmul_multiplies_the_rows_in_use_and_no_others(counts, idle, seed):
    rng, ends = np.random.default_rng(seed), np.cumsum(counts)
    rows, dout = rng.standard_normal((ends[-1] + idle, 3)), rng.standard_normal((ends[-1] + idle, 2))
    weight = rng.standard_normal((len(counts), 3, 2))
    out, dx, dw = np.zeros_like(dout), np.zeros_like(rows), np.zeros_like(weight)
    for row, expert in enumerate(np.repeat(np.arange(len(counts)), counts)):
        out[row] = rows[row] @ weight[expert]
        dx[row] = weight[expert] @ dout[row]
        dw[expert] += np.outer(rows[row], dout[row])
    np.testing.assert_allclose(grouped_matmul(rows, weight, ends), out, atol=1e-12)
    np.testing.assert_allclose(grouped_matmul_dx(dout, weight, ends), dx, atol=1e-12)
    np.testing.assert_allclose(grouped_matmul_dw(dout, rows, ends), dw, atol=1e-12)


WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.slow
def test_every_collective_on_three_workers(workers, tmp_path):
    codes, logs = workers.cluster(3, [WORKER], tmp_path)
    for code, log in zip(codes[1:], logs[1:], strict=True):
        assert "all collectives agree" in log, log[-3000:]
        assert not code, log[-3000:]
