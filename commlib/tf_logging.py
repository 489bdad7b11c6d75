"""Import TensorFlow without the lines that it prints about missing libraries."""

import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Written by TensorFlow's C++ before its log level is read; no user needs to act on them.
NOISE = re.compile(
    rb"All log messages before absl::InitializeLog|Unable to register cu(DNN|BLAS|FFT) factory"
    rb"|computation placer already registered|oneDNN custom operations are on"
    rb"|This TensorFlow binary is optimized|To enable the following instructions"
    rb"|Could not find cuda drivers|TF-TRT Warning"
    # no driver here; where there is one but it fails, the line names another error
    rb"|failed call to cuInit: (INTERNAL: CUDA error: Failed call to cuInit: )?UNKNOWN ERROR \(303\)"
)


@contextmanager
def without_noise() -> Iterator[None]:
    """Buffer what the body writes to standard error, then write all lines except those that match ``NOISE``.

    For the import of TensorFlow. From here on it logs errors only, unless ``TF_CPP_MIN_LOG_LEVEL`` says more.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.stderr is None:  # a process without standard streams
        yield
        return
    sys.stderr.flush()
    original, handled = os.dup(2), faulthandler.is_enabled()
    faulthandler.enable(original)  # a crash in native code still prints where, while stderr is redirected
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            if handled:
                faulthandler.enable(2)
            else:
                faulthandler.disable()
            os.close(original)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not NOISE.search(line)))
