"""The files of docs/launch are what the page shows, and what the engines' own schemas allow.

The models of `kubeflow-trainer-api` cover Job, Service, JobSet, TrainJob and its runtimes. Two
packages are too large to be installed for a test, and are asked where they are there:
`kubernetes-validate` (100 MB) for Job and Service, and `skypilot`.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from test_docs import blocks_of, problems_of_command

from trainkit.__main__ import _make_parser

yaml = pytest.importorskip("yaml")

DOCS = Path(__file__).parents[2] / "docs"
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
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    import kubernetes_validate

    kubernetes_validate.validate(records_of("job.yaml")[record], "1.34", strict=True)


@pytest.mark.filterwarnings("ignore")  # of what skypilot imports
def test_skypilot_s_schema_allows_its_file():
    if importlib.util.find_spec("sky") is None:
        pytest.skip("skypilot is not installed")
    import jsonschema
    from sky.utils import schemas

    (task,) = records_of("skypilot.yaml")
    resources = schemas.get_resources_schema()
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], resources)
    task["resources"]["job_recovery"]["recover_on_exit_codes"] = [256]
    with pytest.raises(jsonschema.ValidationError, match="256"):
        jsonschema.validate(task["resources"], resources)


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


def test_the_image_is_short_and_starts_launch():
    lines = (DOCS / "launch" / "Dockerfile").read_text().splitlines()
    assert len(lines) < 20
    assert lines[-1] == 'ENTRYPOINT ["python", "-m", "trainkit", "launch"]'
    copied = [word for x in lines if x.startswith("COPY") for word in x.split()[1:-1]]
    assert all((DOCS.parent / name).exists() for name in copied)


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
