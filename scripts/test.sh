#!/usr/bin/env bash
# Makes .venv (see install.sh), checks style and types, and runs the tests. A stage that fails does not keep the
# others from running.
# usage: scripts/test.sh             what a change has to pass: ten minutes on two cores
#        scripts/test.sh ci          the same, what takes longer, and the tests on a cluster of namespaces
#        scripts/test.sh all         the same as ci, with large tables, many drawn examples, and faults of real ranks
#        scripts/test.sh ARGUMENT…   only pytest with these arguments: scripts/test.sh -k hitopk
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
pytest=(.venv/bin/python -m pytest)
case "$*" in
"" | ci) ;;
all) pytest=(env CLOUDTRAIN_TESTS=all "${pytest[@]}") ;; # see tests/extent.py
*) exec "${pytest[@]}" "$@" ;;
esac
. scripts/stages.sh
unset PYTHONDONTWRITEBYTECODE # a hundred processes would compile our modules again
[ ! -t 1 ] || export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --color=yes" # stages print through a pipe
stage ./scripts/check.sh
stage "${pytest[@]}" -q --numprocesses auto --dist worksteal -m "not launch and not slow and not cluster and not faults"
# The others start processes of their own. Only the files that have such tests: to collect all takes a while.
marked() { grep -rl --include='test_*.py' "mark\.$1" tests; }
# Two jobs at a time: while one starts or ends, most of it one process after the other, the other one works.
launched() { stage "${pytest[@]}" -q --numprocesses 2 --dist loadfile -m "$@"; }
# shellcheck disable=SC2046 # a name is a word
launched "launch and not slow and not cluster" $(marked launch)
if [ $# -gt 0 ]; then
    # shellcheck disable=SC2046
    launched "slow and not cluster" $(marked slow)
    # These measure what passes the links of a cluster, and want the cores for themselves.
    # shellcheck disable=SC2046
    stage "${pytest[@]}" -m cluster $(marked cluster)
    # shellcheck disable=SC2046
    [ "$1" = ci ] || stage "${pytest[@]}" -m faults $(marked faults)
fi
report
