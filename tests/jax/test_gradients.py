"""Gradients of JAX: their means are those of commlib, whatever tree they are in."""

import re
import sys

import numpy as np
import pytest

from commlib import RanksDisagree, Topology
from commlib.errors import InvalidArgument
from commlib.transport import simulated
from tests.launching import ROOT, mpirun, python_on_ranks, tail

jax = pytest.importorskip("jax", reason="JAX is not installed here: scripts/install.sh frameworks")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from commlib.jax import DistributedGradients, broadcast  # noqa: E402

SPARSE = {"name": "hitopk", "density": 0.1}
RANKS = 3


def parameters(seed=0):
    """A tree of lists and dictionaries; 7·11 + 11 + 11 entries."""
    keys = jax.random.split(jax.random.key(seed), 2)
    first = {"kernel": jax.random.normal(keys[0], (7, 11)) / 3, "bias": jnp.zeros(11)}
    return [first, jax.random.normal(keys[1], (11,)) / 3]


def loss(tree, inputs, targets):
    hidden = jnp.tanh(inputs @ tree[0]["kernel"] + tree[0]["bias"])
    return jnp.mean((hidden @ tree[1] - targets) ** 2)


def batch(step, rank=None):
    """The inputs and targets of a step: of all ranks together, or the part of one."""
    rng = np.random.default_rng(step)
    inputs = rng.normal(size=(RANKS, 5, 7)).astype(np.float32)
    inputs = inputs.reshape(-1, 7) if rank is None else inputs[rank]
    return inputs, np.sin(inputs.sum(1))


gradient_of = jax.jit(jax.grad(loss))


def on_ranks(body, config=SPARSE, world_size=RANKS):
    """Return what ``body(gradients, rank)`` returns on each rank."""

    def of_rank(comm):
        with DistributedGradients(parameters(), Topology(comm), config) as gradients:
            return body(gradients, comm.rank)

    return simulated.run(of_rank, world_size)


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), parameters())


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_dense_ranks_train_as_one_rank_on_the_whole_batch():
    optimizer = optax.adam(0.01)

    @jax.jit
    def update(tree, state, mean):
        changes, state = optimizer.update(mean, state)
        return optax.apply_updates(tree, changes), state

    def trained(mean_of):
        tree = parameters()
        state = optimizer.init(tree)
        for step in range(50):
            tree, state = update(tree, state, mean_of(tree, step))
        return flat(tree)

    def of_rank(gradients, rank):
        return trained(lambda tree, step: gradients.reduce(gradient_of(tree, *batch(step, rank))))

    alone = trained(lambda tree, step: gradient_of(tree, *batch(step)))
    for ours in on_ranks(of_rank, {"name": "dense"}):
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-6)


def test_means_lie_beside_each_other_without_a_copy_whatever_lies_between_their_leaves():
    shapes = {"a": (3,), "b": (4, 16), "c": (5,), "d": (32,)}
    drawn = [np.random.default_rng(rank) for rank in range(RANKS)]
    given = [{name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()} for rng in drawn]

    def of_rank(comm):
        with DistributedGradients(given[0], Topology(comm), SPARSE) as gradients:
            mean = gradients.reduce(given[comm.rank])
            apart = mean["d"].unsafe_buffer_pointer() - mean["b"].unsafe_buffer_pointer()
            return mean, gradients.residual, apart

    ranks = simulated.run(of_rank, RANKS)
    assert [apart for *_, apart in ranks] == [mean["b"].nbytes for mean, *_ in ranks]
    for name in shapes:
        kept = sum(residual[name] for _, residual, _ in ranks)
        total = np.sum([each[name] for each in given], axis=0, dtype=np.float64)
        np.testing.assert_allclose(RANKS * np.asarray(ranks[0][0][name]) + kept, total, atol=1e-5)


def test_what_is_not_applied_is_held_back():
    def body(gradients, rank):
        given = [flat(random_tree((rank, step))) for step in range(4)]
        means = [flat(gradients.reduce(random_tree((rank, step)))) for step in range(4)]
        return np.sum(given, axis=0), np.sum(means, axis=0), flat(gradients.residual)

    ranks = on_ranks(body, world_size=5)
    given, residuals = (np.sum([rank[part] for rank in ranks], axis=0) for part in (0, 2))
    np.testing.assert_allclose(5 * ranks[0][1] + residuals, given, rtol=1e-5, atol=1e-5)
    assert all((rank[1] == ranks[0][1]).all() for rank in ranks)


def test_means_have_the_types_of_the_gradients_and_later_steps_leave_them_as_they_are():
    def body(comm):
        shapes = {"half": 3, "brain": (2, 2), "one": (), "many": 5008}
        dtypes = {"half": "float16", "brain": "bfloat16"}
        tree = {name: jnp.ones(shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        with DistributedGradients(tree, Topology(comm), {"name": "dense"}) as gradients:
            means = [
                gradients.reduce(jax.tree.map(lambda leaf, by=step + comm.rank: leaf * by, tree))
                for step in range(6)
            ]
        kinds = [(name, leaf.dtype.name, leaf.shape) for name, leaf in means[0].items()]
        return kinds, [float(leaf.ravel()[-1]) for mean in means for leaf in jax.tree.leaves(mean)]

    expected = [("brain", "bfloat16", (2, 2)), ("half", "float16", (3,)), ("many", "float32", (5008,))]
    expected.append(("one", "float32", ()))
    for kinds, values in simulated.run(body, 2):
        assert sorted(kinds) == expected
        assert values == [step + 0.5 for step in range(6) for _ in range(4)]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all():
    def body(gradients, rank):
        gradients.reduce(random_tree(rank))
        before = flat(gradients.residual)
        spoilt = random_tree(rank)
        if rank == 1:
            spoilt[1] = spoilt[1].at[4].set(jnp.inf)
        mean = flat(gradients.reduce(spoilt))
        return gradients.finite, np.isnan(mean).all(), (flat(gradients.residual) == before).all()

    assert on_ranks(body) == [(False, True, True)] * RANKS


def test_a_state_goes_on_to_the_bit_and_a_switch_applies_the_residual():
    def body(gradients, rank):
        gradients.reduce(random_tree((rank, 0)))
        state = gradients.state_dict()
        through = bits(gradients.reduce(random_tree((rank, 1))))
        gradients.load_state_dict(state)
        again = bits(gradients.reduce(random_tree((rank, 1))))
        residual = flat(gradients.residual)
        gradients.switch({"name": "dense"})
        mean = flat(gradients.reduce(random_tree((rank, 2))))
        return through == again, residual + flat(random_tree((rank, 2))), mean

    ranks = on_ranks(body)
    assert all(rank[0] for rank in ranks)
    expected = np.mean([rank[1] for rank in ranks], axis=0)
    np.testing.assert_allclose(ranks[0][2], expected, rtol=1e-5, atol=1e-6)


def test_a_broadcast_gives_the_arrays_of_rank_0():
    ranks = simulated.run(lambda comm: bits(broadcast(parameters(comm.rank), Topology(comm))), RANKS)
    assert ranks == [bits(parameters(0))] * RANKS


def test_a_parameter_may_be_a_number_of_python():
    def body(comm):
        topology = Topology(comm)
        tree = broadcast({"weights": jnp.ones(3), "scale": 0.5 + comm.rank}, topology)
        with DistributedGradients({"weights": jnp.ones(3), "scale": 1.0}, topology, {"name": "dense"}) as own:
            mean = own.reduce({"weights": jnp.ones(3), "scale": float(comm.rank)})
        return float(tree["scale"]), float(mean["scale"])

    assert simulated.run(body, 2) == [(0.5, 0.5)] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda tree: tree[:1], "gradients: expected a tree like"),
        (lambda tree: jax.tree.map(lambda leaf: leaf[None], tree), r"gradients: .*got .*float32\[1, 11\]"),
    ],
    ids=["structure", "shapes"],
)
def test_another_tree_is_refused(given, message):
    with pytest.raises(InvalidArgument, match=message):
        on_ranks(lambda gradients, rank: gradients.reduce(given(parameters())), world_size=1)


def test_inside_of_jit_one_line_says_where_to_call_it():
    def body(gradients, rank):
        return jax.jit(lambda tree: gradients.reduce(tree))(parameters())

    with pytest.raises(InvalidArgument, match="got tracers: call reduce between two jitted functions"):
        on_ranks(body, world_size=1)


def test_parameters_that_are_no_numbers_or_not_equal_are_refused():
    with pytest.raises(InvalidArgument, match=r"tree\['steps'\]: expected float32, .* got int32"):
        simulated.run(lambda comm: DistributedGradients({"steps": jnp.arange(3)}, Topology(comm), SPARSE), 1)
    with pytest.raises(RanksDisagree, match="variables"):
        simulated.run(lambda comm: DistributedGradients([jnp.ones(3 + comm.rank)], Topology(comm), SPARSE), 2)


@pytest.mark.launch
def test_the_example_learns_on_real_ranks():
    result = mpirun(2, sys.executable, "examples/jax_digits.py")
    assert result.returncode == 0, tail(result)
    accuracies = [float(each) for each in re.findall(r"accuracy (\S+),", result.stdout)]
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.93


@pytest.mark.launch
def test_the_program_of_the_page_learns():
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "from_jax.md").read_text(), re.DOTALL)
    result = python_on_ranks(2, program)
    assert result.returncode == 0, tail(result)
    weights = re.findall(r"weights \[(.*?)\]", result.stdout, re.DOTALL)
    assert len(weights) == 2
    assert all(abs(float(each) - 1) < 0.05 for rank in weights for each in rank.split())
