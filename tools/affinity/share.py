"""How many cores each worker takes from each NUMA node: a transport problem, solved by HiGHS.

    minimise    sum over workers w and nodes n of  distance(w, n) * x[w, n]      and, among those plans, the largest
                                                                                 sum of a single worker
    subject to  sum over n of x[w, n] = share       every worker as many
                sum over w of x[w, n] <= free(n)    no core twice
                x[w, n] whole and not negative

The second aim lets two NPUs of one node share its cores, instead of sending one of them next door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import highspy
import numpy as np


def shares(near: Sequence[int], free: Mapping[int, int], distance: Mapping[tuple[int, int], int]) -> np.ndarray:
    """[W, N] cores of each worker from each node, in the order of `free`; every worker gets the same number.

    Args:
        near: [W] the node nearest to each worker's NPU.
        free: node -> cores that may be given away, at least W in all.
        distance: (node, node) -> distance.
    """
    nodes = list(free)
    workers, count = len(near), len(nodes)
    share = sum(free.values()) // workers
    cost = np.array([[distance[home, node] for node in nodes] for home in near], dtype=float)
    solver = _solver()
    for amount in cost.ravel():
        solver.addCol(amount, 0.0, float(share), 0, np.array([], np.int32), np.array([]))
    # less than the smallest difference of the first aim: distances are whole numbers
    solver.addCol(0.5 / (cost.max() * share + 1), 0.0, highspy.kHighsInf, 0, np.array([], np.int32), np.array([]))
    which = np.arange(workers * count, dtype=np.int32).reshape(workers, count)
    worst = np.int32(workers * count)
    for worker in range(workers):
        solver.addRow(share, share, count, which[worker], np.ones(count))
        row, values = np.append(which[worker], worst), np.append(cost[worker], -1.0)
        solver.addRow(-highspy.kHighsInf, 0.0, count + 1, row, values)
    for column, node in enumerate(nodes):
        solver.addRow(0.0, float(free[node]), workers, which[:, column].copy(), np.ones(workers))
    kinds = np.array([highspy.HighsVarType.kInteger] * which.size)
    solver.changeColsIntegrality(which.size, which.ravel(), kinds)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, "the shares always fit"
    return np.rint(np.array(solver.getSolution().col_value[: which.size])).astype(int).reshape(which.shape)


def _solver() -> highspy.Highs:
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-7, "mip_allow_restart": False}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    return solver
