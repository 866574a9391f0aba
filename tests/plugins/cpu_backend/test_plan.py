import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plugins.cpu_backend.plan import (
    block_count,
    block_layout,
    default_block,
    grouped_matmul,
    grouped_matmul_dw,
    grouped_matmul_dx,
)

counts_per_expert = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda counts: sum(counts) > 0)


@given(counts_per_expert, st.sampled_from([1, 3, 8, 16]))
def test_every_row_has_one_slot_in_a_block_of_its_expert(counts, block):
    ends, rows = np.cumsum(counts), sum(counts)
    expert_of_block, source, slot_of_row = block_layout(ends, rows, block)

    assert len(set(slot_of_row.tolist())) == rows, "two rows share a slot"
    np.testing.assert_array_equal(source[slot_of_row], np.arange(rows))
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
