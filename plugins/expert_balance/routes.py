"""Which rows of a rank's experts go where when one placement follows another. Pure."""

from __future__ import annotations

import numpy as np


def routes(old: np.ndarray, new: np.ndarray, devices: int, rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What `rank` sends and receives, the rows that stay with it included.

    Both ends count the experts between two ranks in the order of their new slots.

    Args:
        old, new: int [E], logical expert -> slot; slot // (E / D) is the device.

    Returns:
        leave: [D] for each rank, the places on `rank` of the experts that it gets; int [any].
        arrive: [D] for each rank, the places on `rank` that its rows fill, in the order in which they are sent.
    """
    each = len(old) // devices
    order = np.argsort(new)
    sent = order[old[order] // each == rank]
    got = order[new[order] // each == rank]
    leave = [old[sent[new[sent] // each == peer]] % each for peer in range(devices)]
    arrive = [new[got[old[got] // each == peer]] % each for peer in range(devices)]
    return leave, arrive
