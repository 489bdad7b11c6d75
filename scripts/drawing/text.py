"""Texts that several tables share."""

from collections.abc import Sequence


def world(nodes: Sequence[int]) -> str:
    """Return the numbers of nodes and ranks.

    >>> world([2, 2, 2, 2]), world([3, 1])
    ('4 nodes × 2 ranks', '2 nodes of 3 and 1 ranks')
    """
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"
