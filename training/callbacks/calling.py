"""The callbacks of a run: in which order they are called, and what an error in one of them becomes."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from commlib.errors import one_line
from training.callbacks.callback import Callback, RunView

FIRST_HOOKS = ("on_build", "on_run_begin")  # whose ValueError is the user's


class CallbackFailed(RuntimeError):
    """A callback of the configuration raised an error, perhaps on this rank alone; one line names it."""


class Callbacks:
    """The callbacks of a run: ``own``, those of the loop, then ``given``, by their names in a configuration.

    ``last``: of the loop, too. An error of one of the loop's own is raised as it is.
    """

    def __init__(
        self,
        own: Sequence[Callback],
        given: Sequence[tuple[str, Callback]] = (),
        last: Sequence[Callback] = (),
    ) -> None:
        self._own, self._given, self._last = list(own), dict(_numbered(given)), list(last)

    def call(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call a hook of all of them; ``hook`` is that of :class:`Callback`."""
        name = hook.__name__
        for callback in self._own:
            getattr(callback, name)(*arguments)
        for place, callback in self._given.items():
            with _named(place, name):
                getattr(callback, name)(*arguments)
        for callback in self._last:
            getattr(callback, name)(*arguments)

    def end(self, run: RunView, error: BaseException) -> None:
        """Call ``on_error`` of all; what that raises is left out, since ``error`` was first."""
        for callback in (*self._own, *self._given.values(), *self._last):
            with suppress(Exception):
                callback.on_error(run, error)

    def leave_out_given(self) -> None:
        """Call only the loop's own from now on."""
        self._given.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one, by name."""
        states: dict[str, Any] = {}
        for place, callback in self._given.items():
            with _named(place, "state_dict"):
                if state := callback.state_dict():
                    states[place] = dict(state)
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore those that are still there."""
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
