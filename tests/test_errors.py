"""The tree of exceptions, and what a misspelt name is answered."""

import inspect

import pytest

from commlib import errors
from commlib.errors import CommlibError, UnknownName, look_up

EXCEPTIONS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, Exception)]
TABLE = {"dense": 1, "hitopk": 2, "gtopk": 3}


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_every_exception_is_drawn_in_the_tree_and_what_callers_got_wrong_is_a_value_error(exception):
    assert issubclass(exception, CommlibError)
    assert exception.__name__ in errors.__doc__
    of_callers = {"UnknownName", "InvalidArgument", "NonFiniteInput", "RanksDisagree", "LaunchError"}
    assert issubclass(exception, ValueError) == (exception.__name__ in of_callers)


@pytest.mark.parametrize(
    "name, message",
    [
        ("hitopkk", 'unknown reducer "hitopkk" (known: dense, hitopk, gtopk), did you mean "hitopk"?'),
        ("Dense", 'unknown reducer "Dense" (known: dense, hitopk, gtopk), did you mean "dense"?'),
        ("qqq", 'unknown reducer "qqq" (known: dense, hitopk, gtopk)'),
        (3, 'unknown reducer "3" (known: dense, hitopk, gtopk)'),
        ([], 'unknown reducer "[]" (known: dense, hitopk, gtopk)'),
        ("", 'unknown reducer "" (known: dense, hitopk, gtopk)'),
    ],
)
def test_an_unknown_name_lists_the_known_in_their_order_and_suggests_the_nearest(name, message):
    with pytest.raises(UnknownName) as caught:
        look_up(TABLE, "reducer", name)
    assert str(caught.value) == message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
