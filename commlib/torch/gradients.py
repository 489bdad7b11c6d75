"""The communication hook of DistributedDataParallel: from its buckets to those of an exchange, and back.

DDP gives a bucket to the hook when its gradients are computed, in the same order on all ranks. At the end of
backpropagation it waits for the futures that the hook returned; with overlap it copies one mean while others
are exchanged. Whether a step counts is known when all are: if it does not, all gradients are then made NaN.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import InvalidArgument, RanksDisagree, UseAfterClose, one_line
from commlib.exchange import BucketExchange, check_config, check_variables
from commlib.reducers import Report
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.transport.base import Closing
from commlib.vectors import Float32

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# DDP makes its buckets anew after the first step, with a static graph after the second. The steps until then
# are exchanged when all gradients are there.
COLLECTED_STEPS = 3

Layout = list[list[str]]  # the names of the parameters of each bucket


@dataclass
class _Bucket:
    """A bucket of DDP in the step under way: ``buffer`` holds the gradient, ``future`` will hold the mean."""

    names: list[str]
    buffer: torch.Tensor
    future: Any = field(default_factory=torch.futures.Future)

    @property
    def gradient(self) -> Float32:
        """The gradient in float32; where it is float32, this is the memory of DDP."""
        gradient: Float32 = self.buffer.detach().float().numpy()
        return gradient

    def complete(self, mean: Float32) -> None:
        """Give DDP the mean; where that cannot be converted, its own gradient: it must not wait for ever."""
        given = self.buffer
        try:
            given = torch.from_numpy(mean).to(self.buffer.dtype)
        finally:
            self.future.set_result(given)


def register(
    ddp: DistributedDataParallel, topology: Topology, config: Mapping[str, Any], *, overlap: bool = True
) -> "DistributedGradients":
    """Make ``ddp`` average its gradients by a reducer; return what holds the reducer and its residual.

    ``ddp``: a model on the CPU in DistributedDataParallel, without a hook; its gradients are float32, float16
    or bfloat16, and are added up in float32. ``topology``: of the ranks of its process group. ``config``: the
    name of a reducer and its options, as for ``commlib.make_reducer``.

    ``overlap``: a thread exchanges each bucket of DDP while backpropagation computes the next ones. The first
    three steps are exchanged at their ends, since DDP remakes its buckets in between.

    All ranks call it together. ``InvalidArgument`` names what cannot be, ``RanksDisagree`` what differs.
    """
    return DistributedGradients(ddp, topology, config, overlap=overlap)


class DistributedGradients(Closing):
    """Averages the gradients of a model in DistributedDataParallel; made by ``register``.

    Each bucket of DDP has a reducer of its own. When DDP rebuilds its buckets, the reducers are rebuilt as
    well, and each parameter keeps its residual. ``exchange``: the ``commlib.BucketExchange`` below, made
    in the first step. ``report``: of the latest step, ``None`` before the first.

    Where a rank has a NaN or an infinity, the step is skipped: all gradients become NaN on all ranks, and no
    residual changes. Test ``finite`` before ``optimizer.step()``, or let ``torch.amp.GradScaler`` do so; the
    residual keeps the scale of the steps that it comes from.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        topology: Topology,
        config: Mapping[str, Any],
        *,
        overlap: bool = True,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise InvalidArgument(f"ddp: expected a DistributedDataParallel, got {type(ddp).__name__}")
        if topology.world.arrays is not np:
            raise InvalidArgument("topology: expected a transport of arrays in host memory, got one of GPUs")
        self.topology, self.config, self._overlap = topology, check_config(config), overlap
        self._parameters = _parameters(ddp)
        check_process_group(ddp.process_group, topology)
        shapes = [tuple(parameter.shape) for parameter in self._parameters.values()]
        check_variables(topology.world, list(self._parameters), shapes)
        self._name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        self.exchange: BucketExchange | None = None
        self.report: Report | None = None
        self._layout: Layout = []  # of the buckets of the exchange
        self._places: dict[str, slice] = {}  # of the parameters, in the vector of the exchange
        self._recorder: Recorder | None = None
        self._collected = 0  # steps since the hook was registered or a state was loaded
        self._buckets: list[_Bucket] = []  # of the step under way, until the last one is there
        self._computed: set[int] = set()  # parameters with a new gradient
        self._is_exchanging = self._is_closed = False
        try:
            ddp.register_comm_hook(None, self._hook)
        except RuntimeError as error:
            raise InvalidArgument(
                f"ddp: expected one without a hook: {one_line(str(error).splitlines()[0])}"
            ) from None
        self._handles = [ddp.register_forward_pre_hook(self._before_forward)]
        for parameter in self._parameters.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))

    @property
    def finite(self) -> bool:
        """Whether the latest step counts; else its gradients are NaN, and the optimizer must not take it."""
        return self.report is None or self.report.finite

    @property
    def residual(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent: a float32 vector for each parameter's name, in its memory's order."""
        if self.exchange is None:
            return {name: torch.zeros(each.numel()) for name, each in self._parameters.items()}
        residual = torch.from_numpy(self.exchange.residual)
        return {name: residual[self._places[name]] for name in self._parameters}

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer, on all ranks together; its first step applies the old one's residual."""
        self.config = check_config(config)
        if self.exchange is not None:
            self.exchange.switch(self.config)

    def record(self, recorder: Recorder | None) -> None:
        """Record a span of each stage in ``recorder`` from the next step on, or stop recording."""
        self._recorder = recorder
        if self.exchange is not None:
            self.exchange.record(recorder)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's reducers: copies, of tensors and plain Python, for ``torch.save``.

        Each rank keeps its own, beside the state of the model and of the optimizer, between two steps.
        """
        state = None if self.exchange is None else with_tensors(self.exchange.state_dict())
        return {"layout": copy.deepcopy(self._layout), "exchange": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on this rank, for a model of equal parameters.

        The next steps are those that would have followed, to the bit, if the state was taken after the third
        step. ``InvalidArgument`` for other parameters, another reducer or other nodes.
        """
        names = {name for bucket in state["layout"] for name in bucket}
        if names and names != self._parameters.keys():
            apart = ", ".join(sorted(names ^ self._parameters.keys()))
            raise InvalidArgument(
                f"state: expected one of the same parameters, got one that differs in {apart}"
            )
        self._forget()
        if state["exchange"] is None:
            return
        self._make_exchange(state["layout"])
        assert self.exchange is not None
        self.exchange.load_state_dict(with_arrays(state["exchange"]))

    def close(self) -> None:
        """Free what the reducers have made; all ranks call it together. The topology stays open.

        The model computes no gradients any more: DDP cannot lose a hook.
        """
        self._expect_whole_step()
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._forget()

    def _forget(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
        self.exchange, self._layout, self._collected = None, [], 0

    # -------------------------------------------------------------------------------- a step

    def _hook(self, state: None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket of DDP, which gives the buckets of a step in the same order on all ranks."""
        if self._is_closed:
            raise UseAfterClose("the hook of this model was closed: wrap the model in DDP again")
        names = [self._name_of[id(parameter)] for parameter in bucket.parameters()]
        if bucket.buffer().is_sparse:
            raise InvalidArgument(f"gradient: expected a dense one, got a sparse one of {names[0]}")
        taken = _Bucket(names, bucket.buffer())
        self._buckets.append(taken)
        is_collected = self._collected < COLLECTED_STEPS
        if not is_collected:
            self._submit(len(self._buckets) - 1, taken)
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            self._computed.clear()
            self._is_exchanging = False
            if is_collected:
                self._exchange_collected(buckets)
            else:
                self._end_step(buckets)
        return taken.future

    def _submit(self, number: int, bucket: _Bucket) -> None:
        assert self.exchange is not None
        if self._layout[number : number + 1] != [bucket.names]:
            raise InvalidArgument(
                f"ddp: expected the buckets of the step before, got another with {bucket.names[0]}"
            )
        self.exchange.submit(number, bucket.gradient, bucket.complete if self.exchange.overlaps else None)

    def _end_step(self, buckets: list[_Bucket]) -> None:
        """Finish the step when DDP begins to wait for the means; with overlap, when it has copied them."""
        assert self.exchange is not None
        is_early = self.exchange.overlaps
        try:  # DDP adds its own end of the step behind this one
            _at_the_end(self._finish_behind_ddp if is_early else partial(self._give, buckets))
        except RuntimeError:  # for a rank in ``ddp.join()``, there is no backpropagation
            self._finish() if is_early else self._give(buckets)

    def _exchange_collected(self, buckets: list[_Bucket]) -> None:
        """Exchange a step at its end, in the buckets of the exchange, whatever DDP's are.

        They become DDP's in the last of these steps. After a state was loaded they are those of the state.
        """
        self._collected += 1
        layout = [each.names for each in buckets]
        if self.exchange is None or (self._collected == COLLECTED_STEPS and layout != self._layout):
            self._make_exchange(layout)
        assert self.exchange is not None
        gradients: dict[str, Float32] = {}
        for each in buckets:
            gradients |= zip(each.names, np.split(each.gradient, self._ends(each.names)[:-1]), strict=True)
        for number, names in enumerate(self._layout):
            self.exchange.submit(number, np.concatenate([gradients[name] for name in names]))
        self._give(buckets)

    def _give(self, buckets: list[_Bucket]) -> None:
        """Wait for the means of all buckets, and give them to DDP."""
        assert self.exchange is not None
        mean = self._finish()
        if [each.names for each in buckets] == self._layout:
            parts = [mean[own] for own in self.exchange.slices]
        else:
            parts = [np.concatenate([mean[self._places[name]] for name in each.names]) for each in buckets]
        for each, part in zip(buckets, parts, strict=True):
            each.complete(part)

    def _finish_behind_ddp(self) -> None:
        _at_the_end(partial(self._finish, self.topology.world.now()))

    def _finish(self, since: float | None = None) -> Float32:
        """Return the mean of the step. ``since``: when DDP, which has copied it, began to wait."""
        assert self.exchange is not None
        mean, self.report = self.exchange.wait(since)
        if since is not None and not self.report.finite:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return mean

    def _make_exchange(self, layout: Layout) -> None:
        """Make the reducers of these buckets; the residuals of the reducers before them follow."""
        before, residual = self.exchange, self.residual
        sizes = [self._ends(names)[-1] for names in layout]
        shapes = [[tuple(self._parameters[name].shape) for name in names] for names in layout]
        self.exchange = BucketExchange(
            self.topology, sizes, self.config, shapes=shapes, overlap=self._overlap and len(sizes) > 1
        )
        self.exchange.record(self._recorder)
        self._layout = [list(names) for names in layout]
        names = [name for bucket in layout for name in bucket]
        ends = self._ends(names)
        self._places = {
            name: slice(low, high) for name, low, high in zip(names, [0, *ends], ends, strict=False)
        }
        if before is not None:
            self.exchange.add_residual(torch.cat([residual[name] for name in names]).numpy())
            before.close()

    def _ends(self, names: Sequence[str]) -> list[int]:
        return list(accumulate(self._parameters[name].numel() for name in names))

    # ------------------------------------------------------------- gradients that do not come

    def _note(self, parameter: torch.Tensor) -> None:
        self._computed.add(id(parameter))

    def _before_forward(self, ddp: DistributedDataParallel, inputs: Any) -> None:
        self._expect_whole_step()
        self._computed.clear()
        self._is_exchanging = ddp.require_backward_grad_sync and torch.is_grad_enabled()

    def _expect_whole_step(self) -> None:
        """Raise ``InvalidArgument`` where a backpropagation did not compute the gradients of all buckets."""
        if self._is_exchanging and self._computed:
            absent = [name for name, each in self._parameters.items() if id(each) not in self._computed]
            raise InvalidArgument(
                f"gradients: the loss of rank {self.topology.world.rank} does not depend on "
                f"{', '.join(absent)}: expected one that does on all ranks, or "
                "DistributedDataParallel(find_unused_parameters=True)"
            )


def _at_the_end(call: Callable[[], Any]) -> None:
    """Call it at the end of the backpropagation that is under way, after what is to be called by now."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _parameters(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the parameters that DDP exchanges, by name."""
    ignored = set(ddp.parameters_to_ignore)
    found = {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    for name, parameter in found.items():
        if parameter.dtype not in DTYPES:
            raise InvalidArgument(f"{name}: expected float32, float16 or bfloat16, got {parameter.dtype}")
        if parameter.device.type != "cpu":
            raise InvalidArgument(f"{name}: expected a parameter on the CPU, got one on {parameter.device}")
    return found


def with_tensors(state: Any) -> Any:
    """Return a state for ``torch.save``: tensors for arrays, which share their memory, and plain numbers."""
    if isinstance(state, dict):
        return {key: with_tensors(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_tensors(each) for each in state)
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state)
    return state.item() if isinstance(state, np.generic) else state


def with_arrays(state: Any) -> Any:
    """Return a state of ``with_tensors`` with arrays in place of tensors, which share their memory."""
    if isinstance(state, dict):
        return {key: with_arrays(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_arrays(each) for each in state)
    return state.numpy() if isinstance(state, torch.Tensor) else state


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
