"""How much is tested: by default a part of the large tables, and all of them by ``./scripts/test.sh all``."""

import os
from collections.abc import Sequence
from typing import Any

ALL = os.environ.get("CLOUDTRAIN_TESTS") == "all"


def more(*values: Any) -> tuple[Any, ...]:
    """Return the values that only a run of all tests adds to a table."""
    return values if ALL else ()


def dealt(one: Any, ones: Sequence[Any], other: Any, others: Sequence[Any]) -> bool:
    """Return whether ``one`` is dealt ``other``: each of ``ones`` is dealt one of ``others`` in turn."""
    return list(others).index(other) == list(ones).index(one) % len(others)


def examples(number: int) -> int:
    """Return how many examples Hypothesis draws: ``number`` in a run of all tests, else a tenth."""
    return number if ALL else max(3, number // 10)
