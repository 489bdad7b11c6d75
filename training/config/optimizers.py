"""Optimizers by name: the records of their settings, and the optimizers built from them."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import SerializeAsAny

from pto.norms import Way
from pto.parallel import How
from pto.rules import BIAS_AND_NORMALISATION, EMBEDDINGS_AND_LOGITS, Scale
from training.config.schema import Count, Expression, Momentum, Positive, Rate, Record, named, record_in

if TYPE_CHECKING:
    from pto.keras import LayerWise


class Optimizer(Record):
    """The settings of all optimizers."""

    name: str
    """A name of ``OPTIMIZERS``."""
    weight_decay: Rate = 0.0
    """L2 coefficient: ``weight_decay·w`` is added to the gradient of a weight (``lamb``: to its step)."""
    exclude: Expression | None = BIAS_AND_NORMALISATION
    """Weights whose path matches have no weight decay, and no trust ratio (``lars``, ``lamb``)."""
    sharded: bool = False
    """In dense phases each rank updates its part of the weights, and has the state of that part only."""

    def make(self) -> "LayerWise":
        """Return the optimizer, which imports TensorFlow."""
        from pto import keras

        settings = self.model_dump(exclude={"name", "sharded", "norms"})
        return getattr(keras, type(self).__name__.upper())(**settings)


class _WithMomentum(Optimizer):
    momentum: Momentum = 0.9
    """Share of the last update that is added to the next; the default of phases that give none."""
    nesterov: bool = False
    """Whether the weights are moved by Nesterov's momentum."""


class _WithMoments(Optimizer):
    beta_1: Momentum = 0.9
    """Share of the mean gradient so far that is kept in a step."""
    beta_2: Momentum = 0.999
    """Share of the mean squared gradient so far that is kept in a step."""
    epsilon: Positive = 1e-8
    """Added to what is divided by."""
    freeze_variance: Count | None = None
    """Steps after which the second moment is frozen, as in 1-bit Adam, for sparse exchanges from then on."""


class Sgd(_WithMomentum):
    """Gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"


class Adam(_WithMoments):
    """Adaptive moments (Kingma and Ba 2015); ``weight_decay`` is part of the gradient."""

    name: Literal["adam"] = "adam"


class AdamW(Adam):
    """Adam whose weights decay apart from the gradient (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: Rate = 0.01
    """Decoupled decay: a step subtracts ``learning_rate·weight_decay·w`` from a weight."""


class Lars(_WithMomentum):
    """Layer-wise adaptive rates, for large batches (You et al. 2017)."""

    name: Literal["lars"] = "lars"
    trust: Positive = 0.001
    """Trust coefficient: the largest norm of a layer's update, over its weights' norm, at learning rate 1."""
    epsilon: Rate = 0.0
    """Added to the denominator of the trust ratio."""
    norms: Way = "auto"
    """How ranks share the work of computing norms."""


class Lamb(_WithMoments):
    """Layer-wise adaptive rates for Adam (You et al. 2020)."""

    name: Literal["lamb"] = "lamb"
    epsilon: Positive = 1e-6
    least_norm: Rate = 0.0
    """Lower bound to which the norm of a layer's weights is clipped in its trust ratio."""
    largest_norm: Positive | None = None
    """Upper bound to which that norm is clipped."""
    norms: Way = "auto"
    """How ranks share the work of computing norms."""


class Muon(_WithMomentum, _WithMoments):
    """Moves matrices along their orthogonalised momentum (Jordan et al. 2024), other weights by AdamW."""

    name: Literal["muon"] = "muon"
    weight_decay: Rate = 0.01
    """Decoupled decay: a step subtracts ``learning_rate·weight_decay·w`` from a weight."""
    momentum: Momentum = 0.95
    nesterov: bool = True
    scale: Scale = "rms"
    """Scale of a matrix's update: `rms` makes its entries as large as AdamW's, whose learning rates then fit;
    `spectral` is √(outputs/inputs), at least 1."""
    adamw: Expression = EMBEDDINGS_AND_LOGITS
    """Weights whose path matches are updated by AdamW, as are all weights that are not matrices."""
    newton_schulz: How = "auto"
    """How ranks share the work of making matrices orthogonal."""


OPTIMIZERS: dict[str, type[Optimizer]] = dict(
    sgd=Sgd, adam=Adam, adamw=AdamW, lars=Lars, lamb=Lamb, muon=Muon
)


AnyOptimizer = Annotated[
    SerializeAsAny[Optimizer],
    record_in(OPTIMIZERS, "optimizer", "sgd", "a name, or the key name and others", short=named),
]
