"""What each reducer costs, in closed form: the bytes that it sends and the seconds that these take."""

from commlib.cost.compute import Speeds
from commlib.cost.seconds import Prediction, predict
from commlib.cost.traffic import (
    FORMULAS,
    Formula,
    allgather,
    dense,
    dsar_split,
    gtopk,
    hioktopk,
    hitopk,
    oktopk,
    sparse_bytes,
    ssar_doubling,
    ssar_split,
    torus2d,
)

__all__ = [
    "FORMULAS",
    "Formula",
    "Prediction",
    "Speeds",
    "allgather",
    "dense",
    "dsar_split",
    "gtopk",
    "hioktopk",
    "hitopk",
    "oktopk",
    "predict",
    "sparse_bytes",
    "ssar_doubling",
    "ssar_split",
    "torus2d",
]
