"""The files in examples/cluster are well-formed, and their recipes compose."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.placement import Role, check_fit, roles_of
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.repository.documentation import ROOT, check_command

FOLDER = ROOT / "examples" / "cluster"


@pytest.fixture
def manifest() -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text(encoding="utf-8")))


@pytest.fixture
def job(manifest) -> dict:
    return manifest[0]


def test_rayjob_manifest_is_a_job_of_kuberay(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    fields = {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
    assert set(job["spec"]) == fields | {"backoffLimit"}
    check_command(shlex.split(job["spec"]["entrypoint"]))
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"\nray=={version} " in (ROOT / "requirements" / "cpu.lock.txt").read_text(encoding="utf-8")


def test_rayjob_groups_have_the_fields_of_kuberay(job):
    # Required and known fields of HeadGroupSpec and WorkerGroupSpec, ray.io/v1; parameters of `ray start` are strings.
    cluster = job["spec"]["rayClusterSpec"]
    required, known = {"rayStartParams", "template"}, {"headService", "enableIngress", "serviceType"}
    assert required <= set(cluster["headGroupSpec"]) <= required | known
    required |= {"groupName", "minReplicas", "maxReplicas"}
    for group in cluster["workerGroupSpecs"]:
        assert required <= set(group) <= required | {"replicas", "numOfHosts", "scaleStrategy"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert isinstance(job["spec"]["shutdownAfterJobFinishes"], bool)
    assert isinstance(job["spec"]["ttlSecondsAfterFinished"], int)


def recipe_of_slurm(text: str) -> str:
    """The command of the recipe in the script, before the user's options."""
    (command,) = re.findall(r"python -m rl_plugins\.recipes.*?(?=\"\$@\")", text, re.DOTALL)
    return command


def test_jobs_that_start_again_continue_their_run(job):
    assert job["spec"]["backoffLimit"] > 0
    assert "run.resume=auto" in shlex.split(job["spec"]["entrypoint"])
    text = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    assert "\n#SBATCH --requeue\n" in text and "\n#SBATCH --open-mode=append\n" in text
    assert " run.resume=auto " in recipe_of_slurm(text)


def placed(command: list[str]) -> list[Role]:
    """The roles of a recipe's command on GPUs."""
    overrides = [word for word in command if "=" in word and not word.startswith("RAY_")]
    return roles_of(parse_config(compose_config("grpo", [*overrides, "placement.device=cuda"])))


def check_is_tight(roles: list[Role], machine: dict[str, float], machines: int) -> None:
    """Check that the roles fit the machines, and do not fit one machine less."""
    check_fit(roles, [machine] * machines, "the cluster")
    with pytest.raises(ConfigError, match="Lower placement"):
        check_fit(roles, [machine] * (machines - 1), "the cluster")


def test_rayjob_run_fits_the_machines_of_the_manifest(job):
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    machine = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    check_is_tight(placed(shlex.split(job["spec"]["entrypoint"])), machine, workers["replicas"])


def test_rayjob_pods_have_sizes_and_mount_the_shared_folder(job):
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] and container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert "/shared" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_rayjob_asks_for_a_token_and_runs_without_rights(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_network_policy_admits_pods_of_the_run_and_the_operator(manifest):
    job, policy = manifest
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == chosen
    own, operator = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": chosen}}]} and policy["spec"]["policyTypes"] == ["Ingress"]
    (peer,) = operator["from"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]


def test_rayjob_has_a_gpu_for_every_training_worker(job):
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["maxReplicas"] == workers["replicas"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits["nvidia.com/gpu"]) * workers["replicas"]
    assert f"placement.num_workers={gpus}" in job["spec"]["entrypoint"].split()


def test_slurm_script_is_a_job_whose_run_fits_the_machines():
    script = FOLDER / "slurm.sh"
    outcome = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    text = script.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    gpus = int(options["nodes"]) * int(options["gpus-per-node"])
    assert f"placement.num_workers={gpus} " in text and f"--num-gpus {options['gpus-per-node']} " in text
    # A value inserted by the shell is one word for the recipe.
    words = shlex.split(re.sub(r"\$\{[^}]*\}|\$\w+", "word", recipe_of_slurm(text).replace("\\\n", " ")))
    check_command(words)
    machine = {"CPU": float(options["cpus-per-task"]), "GPU": float(options["gpus-per-node"])}
    check_is_tight(placed(words), machine, int(options["nodes"]))


def test_slurm_script_takes_variables_from_slurm_and_the_user(tmp_path):
    text = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    used = set(re.findall(r"\$\{?([A-Z_]+)", text))
    # Slurm sets SLURM_ variables for jobs with --nodes and --cpus-per-task, and the script sets RAY_TMPDIR; the user's
    # variables have an error message.
    of_slurm = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK"}
    assert used == of_slurm | {"ENVIRONMENT", "SHARED", "RUN", "MLFLOW_TRACKING_URI", "RAY_TMPDIR"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    given = {"PATH": os.environ["PATH"], "ENVIRONMENT": str(tmp_path), "SHARED": str(tmp_path)}
    given |= {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    for name in ("ENVIRONMENT", "SHARED", "MLFLOW_TRACKING_URI"):
        environment = {key: value for key, value in given.items() if key != name}
        outcome = subprocess.run(["bash", str(FOLDER / "slurm.sh")], capture_output=True, text=True, env=environment)
        assert outcome.returncode != 0 and f"{name}: " in outcome.stderr


def test_command_in_the_head_of_the_slurm_script_gives_the_variables():
    (command,) = re.findall(r"^#   (.*sbatch .*)$", (FOLDER / "slurm.sh").read_text(encoding="utf-8"), re.MULTILINE)
    check_command(shlex.split(command))


AFTER_RAY = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
"""A stand-in for srun or Ray: run the recipe's command."""


def slurm_job(folder: Path, python: str, number: int, srun: str = AFTER_RAY) -> dict[str, str]:
    """Write stand-ins of the programs of a Slurm job, and return the variables of the job.

    Args:
        folder: shared folder, which also gets the environment.
        python: lines of the stand-in for Python.
        number: number of the job.
        srun: lines of the stand-in for srun.
    """
    programs = folder / "environment" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    shell = {
        "activate": f"PATH={programs}:$PATH",
        "scontrol": "echo machine-1; echo machine-2",
        "srun": srun,
        "ray": AFTER_RAY,
        "python": python,
    }
    for name, text in shell.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {"NODELIST": "machine-[1-2]", "NUM_NODES": "2", "ID": str(number)}
    slurm = {**{f"SLURM_JOB_{name}": value for name, value in slurm.items()}, "SLURM_CPUS_PER_TASK": "16"}
    given = {"ENVIRONMENT": str(programs.parent), "SHARED": str(folder), "MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    return {**os.environ, **slurm, **given}


def test_slurm_script_gives_each_job_a_run_and_continues_a_named_run(tmp_path):
    def run_of(number: int, **more: str) -> list[str]:
        environment = slurm_job(tmp_path, 'printf "%s\\n" "$@"', number) | more
        script = ["bash", str(FOLDER / "slurm.sh")]
        said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout
        return [line.partition("=")[2] for line in said.splitlines() if line.startswith("run.")]

    folder = str(tmp_path / "outputs")
    assert run_of(17) == run_of(17) == [folder, "grpo-17", "auto"]
    assert run_of(18) == [folder, "grpo-18", "auto"]
    assert run_of(18, RUN="grpo-17") == run_of(17)


def test_slurm_script_fails_if_ray_ends_with_status_0_without_a_finished_run(tmp_path):
    def status(python: str, srun: str) -> int:
        script = ["bash", str(FOLDER / "slurm.sh")]
        outcome = subprocess.run(script, env=slurm_job(tmp_path, python, 17, srun), capture_output=True, text=True)
        assert ("the recipe has not run to its end" in outcome.stderr) == (outcome.returncode == 1)
        assert list(tmp_path.glob("ray-token-*")) == []
        return outcome.returncode

    assert status("exit 0", AFTER_RAY) == 0
    assert status("exit 0", "exit 0") == status("kill $PPID", f"({AFTER_RAY}); exit 0") == 1
    assert status("exit 2", AFTER_RAY) == 2


def test_slurm_step_has_the_cpus_of_the_job(tmp_path):
    environment = slurm_job(tmp_path, "", 17, f'printf "%s\\n" "$@"; {AFTER_RAY}')
    script = ["bash", str(FOLDER / "slurm.sh")]
    said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout
    words = said.splitlines()
    step = words[: words.index("sh")]
    assert step == ["--cpus-per-task=16"]
    assert words[words.index("--num-cpus") + 1] == "16"


def test_ray_of_each_slurm_job_has_a_short_folder_of_the_user_alone(tmp_path):
    text = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    assert "\n#SBATCH --exclusive\n" in text and "\n#SBATCH --mem=0\n" in text
    # The stand-in replaces the folder in /tmp of the machine.
    srun = f'shift; command=("${{@:1:3}}"); folder=$4; shift 4; exec "${{command[@]}}" {tmp_path}$folder "$@"'

    def folder_of(number: int) -> Path:
        environment = slurm_job(tmp_path, 'echo "$RAY_TMPDIR"', number, srun)
        script = ["bash", str(FOLDER / "slurm.sh")]
        return Path(subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.strip())

    first, second = folder_of(17), folder_of(18)
    assert first != second == folder_of(18)
    for folder in (first, second):
        made = Path(f"{tmp_path}{folder}")
        assert stat.S_IMODE(made.stat().st_mode) == 0o700 and len(str(folder)) < 30
    made.chmod(0o755)
    folder_of(18)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_slurm_script_asks_the_run_to_stop_on_sigterm(tmp_path):
    run = tmp_path / "outputs" / "grpo-17"
    run.mkdir(parents=True)
    python = (
        "echo $RAY_ADDRESS; echo $RAY_AUTH_MODE $(stat -c %a $RAY_AUTH_TOKEN_PATH) $(wc -c <$RAY_AUTH_TOKEN_PATH); "
        f"touch {tmp_path}/started; until [ -e {run}/stop ]; do sleep 0.05; done; exit 75"
    )
    environment = slurm_job(tmp_path, python, 17)
    script = subprocess.Popen(["bash", str(FOLDER / "slurm.sh")], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        started = tmp_path / "started"
        wait_until(lambda: started.exists() or script.poll() is not None, "the run of the script to start")
        assert started.exists(), f"the script ended with {script.returncode}"
        script.terminate()
        said, _ = script.communicate(timeout=patient(60))
    finally:
        script.kill()
        (run / "stop").touch()
    assert script.returncode == 75
    assert said.splitlines() == [
        "machine-1:6379",
        "token 600 64",
        "stopped and saved. To continue, submit the job again with RUN=grpo-17",
    ]
    assert list(tmp_path.glob("ray-token-*")) == []
