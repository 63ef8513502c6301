"""The files of docs/launch are what the page shows, and what the engines' own schemas allow.

The models of `kubeflow-trainer-api` cover Job, Service, JobSet, TrainJob and its runtimes, and
`kubernetes-validate` has Kubernetes' own schemas of Job and Service. `skypilot` is too large to be
installed for a test (460 MB): `.ci/skypilot` asks it by hand.
"""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from test_docs import blocks_of, problems_of_command

from trainkit.__main__ import _make_parser

yaml = pytest.importorskip("yaml")

DOCS = Path(__file__).parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text()
FILES = sorted(path for path in (DOCS / "launch").iterdir() if path.is_file())
MODELS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def records_of(name):
    return list(yaml.safe_load_all((DOCS / "launch" / name).read_text()))


@pytest.fixture
def check():
    """Return a function that returns what a model of Kubeflow's API makes of a record."""
    pytest.importorskip("pydantic")
    models = pytest.importorskip("kubeflow_trainer_api.models")

    def read(record):
        # A model ignores fields that it does not have: those are missing from what it returns.
        return getattr(models, MODELS[record["kind"]]).from_dict(record).to_dict()

    return read


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_shows_the_file_as_it_is(path):
    shown = [code for _, code, *_ in blocks_of((DOCS / "howto" / "launch.md").read_text())]
    assert path.read_text() in shown


MANIFESTS = [
    (name, index)
    for name, count in (("job.yaml", 2), ("jobset.yaml", 1), ("trainjob.yaml", 2))
    for index in range(count)
]


@pytest.mark.parametrize(("name", "index"), MANIFESTS)
def test_the_models_of_kubeflow_know_every_field(name, index, check):
    record = records_of(name)[index]
    assert check(record) == record


def test_a_field_that_is_wrong_is_found(check):
    service, job = records_of("job.yaml")
    job["spec"]["podFailurePolicy"]["rules"][0]["onPodCondition"] = []
    assert check(job) != job
    service["spec"]["selector"] = ["pretrain"]
    with pytest.raises(ValueError, match="selector"):
        check(service)


@pytest.mark.parametrize("record", [0, 1])
def test_kubernetes_own_schema_allows_the_job(record):
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(records_of("job.yaml")[record], "1.34", strict=True)


def test_skypilot_knows_every_field_of_its_file():
    """By the names of its own schema, which `.ci/skypilot` has recorded; it validates them too."""
    known = json.loads((Path(__file__).parent / "skypilot.json").read_text())
    (task,) = records_of("skypilot.yaml")
    resources = task["resources"]
    assert task.keys() <= set(known["task"])
    assert resources.keys() <= set(known["resources"])
    assert resources["job_recovery"].keys() <= set(known["job_recovery"])


# ------------------------------------------------------------------------------------ commands


def pods():
    """Return the name of a file, its records, and the container that trains."""
    service, job = records_of("job.yaml")
    (jobset,) = records_of("jobset.yaml")
    runtime, train_job = records_of("trainjob.yaml")
    return {
        "job.yaml": (job["spec"], [service, job]),
        "jobset.yaml": (jobset["spec"]["replicatedJobs"][0]["template"]["spec"], [jobset]),
        "trainjob.yaml": (
            runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"],
            [runtime, train_job],
        ),
    }


def arguments_of(name):
    job, records = pods()[name]
    container = job["template"]["spec"]["containers"][0]
    return container.get("args") or records[-1]["spec"]["trainer"]["args"]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_the_arguments_are_those_of_launch_and_of_the_recipe(name):
    torchrun = pytest.importorskip("torch.distributed.run")
    given = [word.replace("$(NODE_RANK)", "1") for word in arguments_of(name)]
    words = _make_parser().parse_args(["launch", *given]).arguments
    parsed = torchrun.get_args_parser().parse_args(words)
    flags = [word.partition("=")[0] for word in parsed.training_script_args]
    assert problems_of_command(f"python {parsed.training_script} {' '.join(flags)}") == []


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml", "trainjob.yaml"])
def test_the_policy_restarts_what_was_saved_and_fails_what_was_refused(name):
    job, _ = pods()[name]
    rules = job["podFailurePolicy"]["rules"]

    def action(code):
        for rule in rules:
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        return "Count"

    assert rules[0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert [action(code) for code in (75, 68, 76, 64, 65, 66, 67, 70, 1)] == [
        "Ignore",
        "Count",
        "Count",
        *["FailJob"] * 6,
    ]
    (container,) = job["template"]["spec"]["containers"]
    named = {x["onExitCodes"]["containerName"] for x in rules if "onExitCodes" in x}
    assert named == {container["name"]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # the policy's condition


def test_the_rendezvous_is_at_the_first_pod_by_name():
    (service, job), (jobset,) = records_of("job.yaml"), records_of("jobset.yaml")
    name = job["metadata"]["name"]
    assert f"--master-addr={name}-0.{service['metadata']['name']}" in arguments_of("job.yaml")
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    (replicated,) = jobset["spec"]["replicatedJobs"]
    host = f"{jobset['metadata']['name']}-{replicated['name']}-0-0"
    assert f"--master-addr={host}.{jobset['spec']['network']['subdomain']}" in arguments_of(
        "jobset.yaml"
    )


def test_the_image_copies_installs_and_starts_what_is_there():
    """It is not built here: no base image can be had. Each of its lines is read."""
    text = (DOCS / "launch" / "Dockerfile").read_text()
    assert len(text.splitlines()) < 20
    lines = [x.partition(" ")[::2] for x in text.splitlines() if x and not x.startswith("#")]
    root = DOCS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    copied = [word for name, rest in lines if name == "COPY" for word in rest.split()[:-1]]
    assert all((root / name).exists() for name in copied)
    # What setuptools reads: the readme and the licence beside the package itself.
    assert {project["readme"], *project["license-files"], "trainkit", "recipes"} < {*copied}
    [release] = re.findall(r"^FROM python:(\S+)-slim$", text, re.MULTILINE)
    assert tuple(map(int, release.split("."))) >= (3, 11)
    assert project["requires-python"] == ">=3.11"
    [extras] = re.findall(r'pip install --no-cache-dir "\.\[(.*)\]"$', text, re.MULTILINE)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert f'pip install ".[{extras}]"' == records_of("skypilot.yaml")[0]["setup"]
    [readme] = re.findall(r"^pip install -e \"\.\[(\w+)\]\" && python", README, re.MULTILINE)
    assert readme in extras.split(",")
    name, command = lines[-1]
    assert (name, command) == ("ENTRYPOINT", '["python", "-m", "trainkit", "launch"]')
    assert _make_parser().parse_args([*json.loads(command)[3:], "--help"]).arguments == ["--help"]


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (75, 0, True), (75, 99, True), (76, 5, True), (76, 6, False), (64, 0, False)],
)
def test_slurm_s_script_requeues_what_says_start_me_again(code, restarts, requeued, tmp_path):
    for name, text in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", DOCS / "launch" / "slurm.sh"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ("requeue 7" in ended.stdout) == requeued


def test_skypilot_s_command_names_flags_that_exist():
    (task,) = records_of("skypilot.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert problems_of_command(task["run"].replace("$(echo", "").replace(")", "")) == []
