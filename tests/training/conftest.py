"""What tests of models share."""

import pytest


@pytest.fixture
def policy(request):
    """Set the policy of dtypes that a test names, and afterwards the one before."""
    import keras  # which tests of checkpoints, also run under mpirun, do without

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)
