"""What is in deploy/: a batch script of Slurm, a manifest of Kubernetes, an image. Ranks without mpirun."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from commlib import transport
from tests.launching import BESIDE_PYTHON, DIGITS, ENVIRONMENT, ROOT, run, tail
from tests.training.small import LINEAR, metrics_of
from training.config.config import load
from training.process import job
from training.process.job import LocalRank

DEPLOY = ROOT / "deploy"
MANIFEST = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())
IMAGE = (DEPLOY / "Dockerfile").read_text()


def script(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------------- ranks without mpirun

# What srun leaves to a rank: PMIx, its own variables, and none of Open MPI's.
AS_SRUN = (
    "for name in ${!OMPI_COMM_@} ${!PRTE_@}; do unset $name; done; "
    'export SLURM_PROCID=$PMIX_RANK SLURM_STEP_NUM_TASKS=2; exec "$@"'
)
PRTERUN = ("prterun", "--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE")


def srun(folder):
    """Make a command ``srun`` that starts two ranks by PMIx, as srun does."""
    words = " ".join((*PRTERUN, "-n", "2", "bash", "-c", f"'{AS_SRUN}'", "srun"))
    return script(folder, "srun", f'while [[ $1 == --* ]]; do shift; done\nexec {words} "$@"')


@pytest.mark.launch
def test_ranks_that_only_pmix_has_started_train_together(tmp_path):
    program = (
        "import os; from commlib import Topology, make_reducer, transport; import numpy as np;"
        "comm = transport.mpi.world(); topology = Topology(comm);"
        "mean = make_reducer('dense', topology, size=8).reduce(np.full(8, comm.rank + 1.0, np.float32));"
        "nodes = [len(node) for node in topology.nodes];"
        "print('OMPI_COMM_WORLD_RANK' in os.environ, comm.size, nodes, mean[0])"
    )
    result = run(str(srun(tmp_path)), "--mpi=pmix", "python", "-c", program)
    assert result.returncode == 0, tail(result)
    # prterun itself prints escape sequences of a terminal, here and there
    assert re.findall(r"\w+ 2 \[2\] [\d.]+", result.stdout) == ["False 2 [2] 1.5"] * 2


@pytest.mark.slow
@pytest.mark.launch
def test_a_batch_script_trains_on_the_ranks_of_srun_and_ends_with_a_checkpoint_on_sigterm(tmp_path):
    """The script itself, with PMIx in place of Slurm; SIGTERM to a rank, as ``--signal`` sends it to all."""
    (tmp_path / ".venv").symlink_to(BESIDE_PYTHON.parent)
    srun(tmp_path / "bin")
    script(tmp_path / "bin", "scontrol", 'echo "scontrol $*"')
    stops = "tests.faults.injected:Terminated"
    words = (
        *(DIGITS, LINEAR, "phases.0.epochs=1", "phases.1.epochs=1", "checkpoints={every_steps: 10}"),
        *("cache={}", "log_every=1", f"callbacks=[{{name: '{stops}', rank: 1, step: 15}}]"),
    )
    environment = {
        **ENVIRONMENT,
        "PATH": f"{tmp_path / 'bin'}:{ENVIRONMENT['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "PYTHONPATH": str(ROOT),
    }

    result = run("bash", DEPLOY / "slurm.sh", *words, env=environment)
    assert result.returncode == 75, tail(result)
    assert "SIGTERM: stopped after step " in result.stdout
    assert result.stdout.endswith("cloudtrain: status 75: the job 7 is queued again\nscontrol requeue 7\n")
    assert metrics_of(tmp_path / "runs")[0]["ranks"] == 2


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, "", False), (2, "", False), (75, "99", True), (137, "", True), (137, "4", True), (137, "5", False)],
)
def test_a_batch_job_is_queued_again_where_that_can_mend_it(tmp_path, status, restarts, requeued):
    script(tmp_path, "srun", f'echo "$*"\nexit {status}')
    script(tmp_path, "scontrol", 'echo "requeued: $*"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    found = run("bash", DEPLOY / "slurm.sh", "my.yaml", "a='b c'", env=environment, cwd=tmp_path)
    assert found.returncode == status, found
    first, *others = found.stdout.splitlines()
    options, command = "--mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=8", ".venv/bin/cloudtrain train"
    assert first == f"{options} {command} my.yaml a='b c' resume=auto"
    assert ("requeued: requeue 7" in others) == requeued


def test_a_batch_script_without_a_configuration_is_one_line():
    found = run("bash", DEPLOY / "slurm.sh")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", ["PMIX_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_an_error_of_all_ranks_is_printed_by_the_first(monkeypatch, name):
    for each in job.WORLD_RANKS:
        monkeypatch.delenv(each, raising=False)
    assert job.is_first()
    monkeypatch.setenv(name, "0")
    assert job.is_first()
    monkeypatch.setenv(name, "3")
    assert not job.is_first()


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        ([{0, 1}, {2, 3}, {4, 5}, {6, 7}], [2, 2, 2, 2]),  # each has its own, as srun binds them
        ([set(range(8))] * 4, [2, 2, 2, 2]),
        ([set(range(3))] * 3, [1, 1, 1]),
        ([{0}] * 4, [1, 1, 1, 1]),
        ([set(range(4)), set(range(4)), {4, 5, 6}, set()], [2, 2, 3, 1]),
    ],
)
def test_a_rank_computes_with_the_cores_that_are_its_own(monkeypatch, cores, threads):
    def body(comm):
        everywhere = [("here", each) for each in cores]
        monkeypatch.setattr(comm, "allgather_objects", lambda value: everywhere)
        monkeypatch.setattr(comm, "host", "here")
        return LocalRank.of(comm)

    found = transport.simulated.run(body, len(cores))
    assert [(each.number, each.ranks, each.threads) for each in found] == [
        (number, len(cores), each) for number, each in enumerate(threads)
    ]


# --------------------------------------------------------------------------------------- Kubernetes


def pods():
    return {name: each["template"]["spec"] for name, each in MANIFEST["spec"]["mpiReplicaSpecs"].items()}


def test_the_manifest_is_an_mpi_job_whose_pods_mount_the_volumes_that_they_have():
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = MANIFEST["spec"]["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    assert replicas["Launcher"]["replicas"] == 1
    for replica, pod in zip(replicas.values(), pods().values(), strict=True):
        assert replica["restartPolicy"] in ("OnFailure", "Never")
        (container,) = pod["containers"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}


def test_nothing_in_a_pod_is_root_and_sshd_listens_where_ssh_looks():
    (worker,) = pods()["Worker"]["containers"]
    assert worker["command"] == ["/usr/sbin/sshd"]
    config = re.search(r"^COPY deploy/sshd_config (\S+)$", IMAGE, re.M)[1]
    assert worker["args"][-2:] == ["-f", config]
    port = worker["ports"][0]["containerPort"]
    assert port > 1024
    assert re.search(r"^ *Port (\d+)$", (DEPLOY / "sshd_config").read_text(), re.M)[1] == str(port)
    assert re.search(r"^ *Port (\d+)$", (DEPLOY / "ssh_config").read_text(), re.M)[1] == str(port)
    user = int(re.search(r"useradd --create-home --uid (\d+) cloudtrain", IMAGE)[1])
    assert all(pod["securityContext"]["runAsUser"] == user > 0 for pod in pods().values())
    assert MANIFEST["spec"]["sshAuthMountPath"] == "/home/cloudtrain/.ssh"


def test_the_launcher_s_command_is_in_the_image_and_its_words_are_a_configuration():
    (launcher,) = pods()["Launcher"]["containers"]
    command = Path(launcher["command"][0])
    assert re.search(rf"^COPY .* \. {command.parents[1]}$", IMAGE, re.M)
    assert os.access(ROOT / command.relative_to(command.parents[1]), os.X_OK)
    options = [word for word in launcher["args"] if word.startswith("--")]
    name, *words = [word for word in launcher["args"] if not word.startswith("--")]
    config = load(name, words)
    assert config.checkpoints is not None
    assert config.resume == "auto"
    mounts = {each["mountPath"] for each in pods()["Worker"]["containers"][0]["volumeMounts"]}
    assert {config.output, str(Path(config.dataset.path).parent), "/dev/shm"} <= mounts
    known = run("cloudtrain", "launch", "--help").stdout
    assert all(option.partition("=")[0] in known for option in options)
    (grace,) = (float(option.partition("=")[2]) for option in options if option.startswith("--grace"))
    assert grace < pods()["Launcher"]["terminationGracePeriodSeconds"]


def test_the_launcher_takes_hosts_and_slots_from_the_operator_s_file(tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    script(tmp_path, ".venv/bin/cloudtrain", 'printf "%s\\n" "$@"; env | grep -c orte || true')
    (tmp_path / "hosts").write_text("j-worker-0.j.default.svc slots=4\nj-worker-1.j.default.svc slots=2\n")
    environment = {"PATH": "/usr/bin:/bin", "HOSTFILE": str(tmp_path / "hosts")}
    environment["OMPI_MCA_orte_keep_fqdn_hostnames"] = "true"
    found = run(tmp_path / "deploy" / "launch.sh", "--restarts=5", "digits", "a=b c", env=environment)
    hosts = "j-worker-0.j.default.svc:4,j-worker-1.j.default.svc:2"
    command = ["launch", "-np", "6", "-H", hosts, "--restarts=5", "digits", "a=b c"]
    assert found.stdout.splitlines() == [*command, "0"]


@pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin:/usr/bin") is None, reason="no sshd here")
def test_sshd_takes_its_configuration_and_ssh_the_launcher_s(tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    config = (DEPLOY / "sshd_config").read_text()
    key = str(tmp_path / "key")
    (tmp_path / "sshd_config").write_text(config.replace("/home/cloudtrain/.ssh/id_rsa", key))
    Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None  # as the image has it
    found = run("/usr/sbin/sshd", "-T", "-f", tmp_path / "sshd_config")
    assert found.returncode == 0, found.stderr
    said = found.stdout.splitlines()
    assert {"port 2222", "passwordauthentication no", "usepam no", "allowusers cloudtrain"} <= set(said)
    found = run("ssh", "-F", DEPLOY / "ssh_config", "-G", "j-worker-0")
    assert "port 2222" in found.stdout.splitlines()


# -------------------------------------------------------------------------------------------- image


def test_the_image_has_what_is_installed_and_copied_and_its_installation_is_no_root_s():
    text = re.sub(r"^\s*#.*$", "", IMAGE, flags=re.M).replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    for name, rest in steps:
        *sources, _ = (word for word in rest.split() if not word.startswith("--"))
        if name == "COPY":
            assert all((ROOT / source).exists() for source in sources), rest
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            assert all(os.access(ROOT / path, os.X_OK) for path in re.findall(r"\./\S+", rest))
    runs = [rest for name, rest in steps if name == "RUN"]
    assert runs[-1] == "./scripts/install.sh"
    assert [rest for name, rest in steps if name == "USER"] == ["cloudtrain"]
    needed = set(re.findall(r"apt-get install ([\w.+-]+)", (ROOT / "scripts" / "install.sh").read_text()))
    assert {"g++", "python3", "python3-venv"} <= needed
    assert needed <= set(next(rest for rest in runs if "apt-get" in rest).split())
