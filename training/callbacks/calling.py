"""The callbacks of a run: the order of their calls, and errors that name the callback."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from commlib.errors import one_line
from training.callbacks.callback import Callback, RunView

FIRST_HOOKS = ("on_build", "on_run_begin")  # a ValueError of these refuses the run


class CallbackFailed(RuntimeError):
    """A callback of the configuration raised an error, perhaps on this rank alone; one line names it."""


class Callbacks:
    """Calls the loop's ``own`` callbacks, those ``given`` by a configuration with their names, and ``last``.

    ``last`` are the loop's, too. An error of one of the loop's callbacks is raised unchanged.
    """

    def __init__(
        self,
        own: Sequence[Callback],
        given: Sequence[tuple[str, Callback]] = (),
        last: Sequence[Callback] = (),
    ) -> None:
        self._own, self._given, self._last = list(own), dict(_numbered(given)), list(last)

    def call(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call ``hook``, a method of :class:`Callback`, of all callbacks."""
        name = hook.__name__
        for place, callback in self._all():
            with nullcontext() if place is None else _named(place, name):
                getattr(callback, name)(*arguments)

    def end(self, run: RunView, error: BaseException) -> None:
        """Call ``on_error`` of all callbacks; ignore what they raise, since ``error`` came first."""
        for _, callback in self._all():
            with suppress(Exception):
                callback.on_error(run, error)

    def _all(self) -> Iterator[tuple[str | None, Callback]]:
        """Yield all callbacks in order; those of the configuration have names."""
        yield from ((None, callback) for callback in self._own)
        yield from self._given.items()
        yield from ((None, callback) for callback in self._last)

    def leave_out_given(self) -> None:
        """Call only the loop's callbacks from now on."""
        self._given.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the configuration's callbacks that have one, by name."""
        states: dict[str, Any] = {}
        for place, callback in self._given.items():
            with _named(place, "state_dict"):
                if state := callback.state_dict():
                    states[place] = dict(state)
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the callbacks that the configuration still has."""
        for place in self._given.keys() & states.keys():
            with _named(place, "load_state_dict"):
                self._given[place].load_state_dict(states[place])


def _numbered(given: Sequence[tuple[str, Callback]]) -> Iterator[tuple[str, Callback]]:
    """Yield callbacks by name, the second of the same name as ``name 2``."""
    seen: Counter[str] = Counter()
    for name, callback in given:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} {seen[name]}", callback


@contextmanager
def _named(place: str, hook: str) -> Iterator[None]:
    """Raise an error of the block with the name of its callback."""
    try:
        yield
    except Exception as error:
        if hook in FIRST_HOOKS and isinstance(error, ValueError):
            raise ValueError(one_line(f"callback {place}: {error}")) from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CallbackFailed(one_line(f"callback {place}: {hook} raised {what} ({where})")) from error
