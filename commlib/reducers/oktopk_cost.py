"""What Ok-Topk costs, among all ranks (``oktopk``) and on the streams between nodes (``hioktopk``)."""

from commlib.cost import Cost, Group, LinkSeconds, Nodes, Step, Work, by_link, union
from commlib.density import entries
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, index_dtype


def most_sent(nodes: Nodes, rank: int, k: int, size: int) -> LinkBytes:
    """Return the most that a rank sends of ``size`` entries: split, magnitudes, balance, all-gather.

    A rank selects at most ``2k`` entries between re-evaluations; the regions' sums are at most ``P`` times
    that; at most ``2k`` reach the global threshold. That is of a step that re-evaluates that threshold: the
    paper's equation 3 puts an ordinary balanced step at most at ``6·k·(P − 1)/P`` words.
    """
    ranks = sum(map(len, nodes))
    entry = index_dtype(size).itemsize + VALUE_BYTES
    selected = min(size, 2 * k)
    to_each = dict.fromkeys(range(ranks), 2 * selected * entry)
    to_each[(rank + 1) % ranks] += selected * entry + VALUE_BYTES * min(size, ranks * selected)
    return by_link(nodes, rank, to_each)


def seconds_among(step: Step, group: Group, k: float, size: float) -> float:
    """Return the seconds to split and reduce, then to balance and gather, among the ranks of ``group``."""
    parts = k / group.size
    split = group.exchange(step.message(parts, size / group.size))
    entry = index_dtype(round(size)).itemsize + VALUE_BYTES
    gather = group.allgather_ints(3) + group.ring(entry * parts)
    magnitudes = VALUE_BYTES * union(group.size, k, size) / group.size
    regions: float = 2 * group.allgather_ints(1) / step.options["repartition_every"]
    threshold: float = group.ring(magnitudes) / step.options["reevaluate_every"]
    return split + gather + regions + threshold


def summing(step: Step, k: float) -> Work:
    """Add up a region, find what is applied and what is not; with a lossy codec, also what of it was sent."""
    work = Work(entry=3 * k, coded=k)
    return work if step.codec.lossless else work + Work(entry=3 * k, coded=k, place=3 * k)


def _traffic(step: Step, rank: int) -> LinkBytes:
    return most_sent(step.nodes, rank, entries(step.density, step.size), step.size)


def _seconds(step: Step) -> LinkSeconds:
    """``6k·(P − 1)/P`` words at most (equation 3), on average over the steps of its periods."""
    intra, inter = step.on_slowest_link(seconds_among(step, step.world, step.k, step.size))
    compared_intra, compared_inter = step.rest_of_comparison(0.0)
    return intra + compared_intra, inter + compared_inter


def _work(step: Step) -> Work:
    """Select; split, reduce, gather the ``k`` entries of the result, and keep what is not in it."""
    return step.selecting(step.size, step.k) + summing(step, step.k) + step.placing(step.k)


OKTOPK_COST = Cost(_traffic, _seconds, _work, is_exact=False)
