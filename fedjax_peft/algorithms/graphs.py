"""Graphs of clients that exchange models, and the weights with which they average.

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours,   W_ii = 1 - Σ_{j≠i} W_ij

These are the weights of Metropolis and Hastings; d_i is the number of neighbours of i. W is
symmetric and its rows sum to 1, on any graph, so that an average over neighbours keeps the mean of
all models. On a ring all weights are 1/3.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError


def ring(nodes: int) -> NDArray[np.bool_]:
    """Returns which nodes of a ring are neighbours, ``[nodes, nodes]``."""
    return torus(nodes, 1)


def torus(height: int, width: int) -> NDArray[np.bool_]:
    """Returns which nodes of a grid are neighbours, whose borders are joined; row by row."""
    nodes = np.arange(height * width).reshape(height, width)
    links = np.zeros((nodes.size, nodes.size), bool)
    for axis in (0, 1):
        links[nodes.ravel(), np.roll(nodes, 1, axis).ravel()] = True
    return _both_ways(links)


def complete(nodes: int) -> NDArray[np.bool_]:
    """Returns the graph in which all nodes are neighbours."""
    return _both_ways(np.ones((nodes, nodes), bool))


def random(nodes: int, degree: int, seed: int) -> NDArray[np.bool_]:
    """Returns a graph in which all pairs of nodes are neighbours with the same probability.

    Args:
      degree: the mean number of neighbours of a node.
    """
    drawn = host_rng(seed, "graph").random((nodes, nodes)) * max(nodes - 1, 1) < degree
    return _both_ways(np.triu(drawn, 1))


def of_pairs(nodes: int, pairs: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """Returns the graph of pairs of neighbours.

    Raises:
      InputError: a pair of other than two different nodes from 0 to ``nodes - 1``.
    """
    links = np.zeros((nodes, nodes), bool)
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= x < nodes for x in pair):
            raise InputError(
                f"A pair of neighbours in graph must be two different clients from 0 to"
                f" {nodes - 1}, and one is {list(pair)}."
            )
        links[pair[0], pair[1]] = True
    return _both_ways(links)


def sides(nodes: int) -> tuple[int, int]:
    """Returns the sides of the torus that is nearest to a square.

    Raises:
      InputError: a prime number of nodes.
    """
    width = next(x for x in range(math.isqrt(nodes), 0, -1) if nodes % x == 0)
    if width == 1 and nodes > 3:
        raise InputError(
            f"{nodes} clients do not make a torus, which needs a number with two factors above 1:"
            f" take {nodes - 1} or {nodes + 1} clients, or graph = 'ring'."
        )
    return nodes // width, width


def check_connected(links: NDArray[np.bool_], advice: str) -> None:
    """Raises InputError for a graph in which some nodes cannot be reached from node 0."""
    reached = np.zeros(len(links), bool)
    reached[0] = True
    while (found := reached | links[reached].any(axis=0)).sum() > reached.sum():
        reached = found
    if not reached.all():
        lost = np.flatnonzero(~reached).tolist()
        raise InputError(
            f"The graph is not connected: client 0 never hears of the clients {_some(lost)}, so"
            f" that they cannot agree on a model. {advice}"
        )


def metropolis(links: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns W_ij of neighbours, and 0 on the diagonal."""
    degrees = links.sum(axis=1)
    return np.where(links, 1 / (1 + np.maximum(degrees[:, None], degrees[None])), 0.0)


def _both_ways(links: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns the graph with every link in both directions, and none from a node to itself."""
    return (links | links.T) & ~np.eye(len(links), dtype=bool)


def _some(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:5]))
    return shown if len(clients) <= 5 else f"{shown} and {len(clients) - 5} more"
