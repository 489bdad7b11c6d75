"""What ranks of PyTorch set up together: the process group, the first weights, and checks of both."""

from typing import Any

import torch
from torch import distributed

from commlib.errors import RanksDisagree
from commlib.exchange import check_variables
from commlib.topology import Topology


def init_process_group(topology: Topology, backend: str = "gloo", **options: Any) -> None:
    """Make torch's process group of the ranks of ``topology``, which all call it together.

    DDP needs one, for the first weights and for buffers. Rank 0 opens a free port for it; no environment
    variable is read. ``options``: those of ``torch.distributed.init_process_group``.
    """
    world = topology.world
    store = None
    if world.rank == 0:
        store = distributed.TCPStore("0.0.0.0", 0, world.size, is_master=True, wait_for_workers=False)
    places = world.allgather_objects((world.host, None if store is None else store.port))
    if store is None:
        host, port = places[0]
        is_here = {host for host, _ in places} == {world.host}
        store = distributed.TCPStore("127.0.0.1" if is_here else host, port, world.size)
    distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, **options)


def check_process_group(group: Any, topology: Topology) -> None:
    """Raise ``RanksDisagree``, on all ranks, unless a process group has the ranks of the topology."""
    size = topology.world.size
    everywhere = topology.world.allgather_ints(
        [distributed.get_rank(group), distributed.get_world_size(group)]
    )
    if sorted(everywhere[:, 0].tolist()) == list(range(size)) and (everywhere[:, 1] == size).all():
        return
    sizes = sorted(set(everywhere[:, 1].tolist()))
    raise RanksDisagree(
        f"process_group: expected the {size} ranks of the topology, got groups of {sizes} ranks: "
        "make it with init_process_group(topology) of commlib.torch"
    )


def broadcast(module: torch.nn.Module, topology: Topology) -> None:
    """Give the parameters and buffers of a module the values of rank 0; all ranks call it together.

    DDP does so by itself. ``RanksDisagree`` where names or shapes differ.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    check_variables(topology.world, list(tensors), [tuple(each.shape) for each in tensors.values()])
    with torch.no_grad():
        for tensor in tensors.values():
            own = tensor.detach().cpu() if topology.world.rank == 0 else None
            tensor.copy_(topology.world.allgather_objects(own)[0])
