#!/usr/bin/env bash
# Runs the benches and keeps what they measured, benchmarks/results/DATE-NAME.jsonl, one JSON object a line;
# then makes the pages that show them, and their pictures, again.
# usage: benchmarks/run.sh [races] [DATE]    three hours: the races of training, or without the word all else
# DATE, today if left out: of a run that was broken off; what it has measured stays.
# What needs an emulated cluster is measured as root on Linux only.
# Each part has the machine for itself: it waits until nothing else runs, and is measured again if something came up.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
races=
if [ "${1:-}" = races ]; then races=-races; shift; fi
results="benchmarks/results/${1:-$(date +%F)}"
measured="$results$races-measured.txt" # the parts of a run that is not complete

idle() { # less than a twentieth of the processors' time is used for three seconds
    local used
    used=$({ head -n 1 /proc/stat; sleep 3; head -n 1 /proc/stat; } |
        awk '{ idle = $5 + $6; all = 0; for (i = 2; i <= 9; i++) all += $i
               if (NR == 2) print int(100 * (1 - (idle - last_idle) / (all - last_all)))
               last_idle = idle; last_all = all }')
    [ "$used" -lt 5 ] || { echo "cloudtrain: other programs use $used % of the processors" >&2; return 1; }
}
alone() { # FILE COMMAND…: into the file what it prints, measured on an idle machine
    local file=$1
    for _ in 1 2; do
        until idle; do sleep 20; done
        "${@:2}" >"$file"
        idle && return
    done
    echo "cloudtrain: another program ran twice beside: ${*:2}" >&2
}
part() { # FILE COMMAND…: appends what the command prints, unless an earlier run has done so
    grep -qsxF -- "${*:2}" "$measured" && return
    echo "cloudtrain: ${*:2}, into $1" >&2
    alone "$results.part" "${@:2}"
    cat "$results.part" >>"$1"
    rm "$results.part"
    echo "${*:2}" >>"$measured"
}
keep() { # name of the records, module, arguments
    part "$results-$1.jsonl" .venv/bin/python -m "$2" "${@:3}" --json
}
finish() {
    for page in draw_benchmarks validate which local_steps; do .venv/bin/python -m "benchmarks.$page"; done
    rm -f "$measured"
    exit
}
has_clusters() { [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ]; }
has_clusters || echo "cloudtrain: what needs an emulated cluster is left out: they need root on Linux" >&2

if [ -n "$races" ]; then
    has_clusters || exit 1
    raced=(--model mlp --reducer hitopk --reducer oktopk --reducer auto)
    keep race benchmarks.race --rate 0.2gbit --layout 4x1 "${raced[@]}"
    keep race-all benchmarks.race --rate 1gbit --layout 4x2 --model mlp --seeds 0
    keep race-overlap benchmarks.race --model vgg16_cifar --rate 0.3gbit --layout 4x1 --reducer dense --reducer hitopk --seeds 0
    finish
fi

keep selection training bench selection
keep reducers training bench reducers
keep cache benchmarks.cache
keep cache benchmarks.cache --samples 600
keep pto benchmarks.pto
part "$results-authors.jsonl" env OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.authors --json
has_clusters || finish

on_cluster() { keep "$1" benchmarks.reducers --cluster "${@:2}"; }
on_cluster cluster --rate 1gbit --size 14728266 # entries of VGG-16
on_cluster cluster-1m --rate 1gbit --size 1000000 --density 0.001 --no-horovod --algorithm ring --steps 40
cells=docs/validation/cells.jsonl before=$(mktemp)
cp "$cells" "$before"
clusters() { # measured again, without what has been appended beside another program
    cp "$before" "$cells"
    .venv/bin/python -m benchmarks.validate --measure
}
part /dev/null clusters
part /dev/null .venv/bin/python -m benchmarks.validate --simulate
part /dev/null .venv/bin/python -m benchmarks.which --predict
.venv/bin/cloudtrain data brown
for what in time link; do part /dev/null .venv/bin/python -m benchmarks.local_steps --$what; done
for loss in logistic hinge; do keep linear benchmarks.linear --cluster --loss $loss; done
keep linear benchmarks.linear --cluster --batch-size 125 --steps 40
keep linear benchmarks.linear --cluster --shape webspam --steps 3 --passes 3
keep linear benchmarks.linear --simulated --steps 4 --passes 3
keep linear benchmarks.linear --cluster --solver coordinate --steps 1 --passes 1
for loss in logistic hinge; do keep linear benchmarks.linear --loss $loss; done

./scripts/install.sh frameworks
mpirun=(.venv-frameworks/bin/mpirun --allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 -x OMP_NUM_THREADS=1)
torch_ddp() { # RATE ARGUMENT…: PyTorch on four nodes of one rank
    local nodes=(-H node1:1,node2:1,node3:1,node4:1 --mca btl_tcp_if_include eth0 -x GLOO_SOCKET_IFNAME=eth0)
    .venv/bin/python -m benchmarks.emulated up --nodes 4 --rate "$1"
    part "$results-torch-ddp.jsonl" .venv/bin/python -m benchmarks.emulated run -- "${mpirun[@]}" "${nodes[@]}" \
        .venv-frameworks/bin/python -m benchmarks.torch_ddp --rate "$@"
    .venv/bin/python -m benchmarks.emulated down
}
torch_ddp 0.2gbit
torch_ddp 1gbit --network deep --batch 1024 --steps 12 --subject 'ddp over gloo' --subject 'dense, no overlap' --subject dense
part "$results-jax-exchange.jsonl" "${mpirun[@]}" -np 2 .venv-frameworks/bin/python -m benchmarks.jax_exchange
finish
