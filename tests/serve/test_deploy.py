"""The files in deploy/: copied files exist, options and arguments are known, probes and timeouts are consistent."""

import dataclasses
import importlib
import json
import re
import shlex

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from arpg import cli
from arpg.errors import InputError
from arpg.serve.server_config import ServeSettings
from support.paths import ROOT

DEPLOY = ROOT / "deploy"


def options():
    """The options of `arpg serve`."""
    command = get_command(cli.app).commands["serve"]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def documents(name):
    return [document for document in yaml.safe_load_all((DEPLOY / name).read_text()) if document]


def instructions():
    """The Dockerfile's instructions as (name, rest); continued lines are joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def test_the_dockerfile_copies_what_exists_and_starts_the_server():
    found = instructions()
    names = [name for name, _ in found]
    assert names[:2] == ["ARG", "FROM"]
    for name, rest in found:
        if name == "COPY" and "--from" not in rest:
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), source
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [s for name, rest in found if name == "COPY" and "--from" not in rest for s in shlex.split(rest)[:-1]]
    assert all(f"!{source}" in kept for source in copied)
    extra = dict(
        part.split("=") for name, rest in found if name == "ARG" for part in [rest] if part.startswith("EXTRA")
    )
    assert f"\n{extra['EXTRA']} = [" in (ROOT / "pyproject.toml").read_text()
    entry = json.loads(next(rest for name, rest in found if name == "ENTRYPOINT"))
    assert entry[:2] == ["arpg", "serve"]
    assert {part for part in entry if part.startswith("--")} <= options()
    assert any(name == "USER" and rest != "root" for name, rest in found)
    assert names.index("USER") < names.index("ENTRYPOINT")


@pytest.mark.parametrize("name", ["kubernetes.yaml", "rayservice.yaml"])
def test_the_manifests_are_valid_kubernetes(name):
    """Every built-in object has only fields that Kubernetes knows, with the right types."""
    built_in = [each for each in documents(name) if each["apiVersion"] != "ray.io/v1"]
    assert {each["kind"] for each in built_in} >= {"PodDisruptionBudget", "NetworkPolicy"}
    if name == "rayservice.yaml":
        (service,) = (each for each in documents(name) if each["kind"] == "RayService")
        cluster = service["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        built_in += [{"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]} for group in groups]
    for document in built_in:
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_an_unknown_field_would_be_found():
    (service,) = (each for each in documents("kubernetes.yaml") if each["kind"] == "Service")
    service["spec"]["selectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, "1.34", strict=True)


def test_the_kubernetes_manifest_fits_the_server():
    deployment, service, budget, policy = documents("kubernetes.yaml")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    given = dict(argument.split("=") for argument in container["args"])
    assert set(given) <= options()
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > stop + float(given["--deadline"])
    assert stop > 2 * container["readinessProbe"]["periodSeconds"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["env"][0]["name"] == "ARPG_API_KEYS"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    entry = json.loads(next(rest for name, rest in instructions() if name == "ENTRYPOINT"))
    assert ports == {"http": int(entry[entry.index("--port") + 1]), "metrics": int(given["--metrics-port"])}
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports)
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == ports["metrics"]


def test_images_are_named_by_digest():
    (kustomization,) = documents("kustomization.yaml")
    assert kustomization["resources"] == ["kubernetes.yaml"]
    (image,) = kustomization["images"]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", image["digest"])
    deployment = documents("kubernetes.yaml")[0]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == image["name"]
    bases = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE=")]
    assert len(bases) == 1
    assert re.search(r"@sha256:[0-9a-f]{64}$", bases[0])
    assert all(rest.split()[0] == "${BASE}" for name, rest in instructions() if name == "FROM")


def test_each_installation_of_the_image_has_one_index():
    (run,) = (rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    assert "--extra-index-url" not in run
    installs = [part for part in run.split("&&") if "pip install" in part]
    assert [part.split()[-1] for part in installs if "--index-url" in part] == ["torch"]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_ray_service_names_what_exists(monkeypatch):
    service, *_ = documents("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (ROOT / "src" / f"{module.replace('.', '/')}.py").is_file()
    pytest.importorskip("ray", reason="needs the extra ray")
    from arpg.serve import ray_serve

    given = {}
    monkeypatch.setattr(
        ray_serve, "application", lambda models, **arguments: given.update(arguments, model=",".join(models))
    )
    arguments = application["args"]
    assert all(isinstance(value, str) for value in arguments.values())
    monkeypatch.setenv("ARPG_API_KEYS", "a-key-for-the-cluster")
    getattr(ray_serve, name)(arguments)
    for key in ("model", "replicas", "max_replicas", "gpus"):
        assert str(given[key]).removesuffix(".0") == arguments[key]
    settings = ServeSettings(device=arguments["device"], max_batch=32, max_pending_requests=256, deadline=120.0)
    assert given["settings"] == settings
    renamed = {"max_pending_requests": "queue"}  # its old name
    getattr(ray_serve, name)({renamed.get(key, key): value for key, value in arguments.items()} | {"dtype": "float32"})
    assert given["settings"] == dataclasses.replace(settings, precision="float32")
    with pytest.raises(InputError, match="unknown argument"):
        getattr(ray_serve, name)({"workers": "2"})
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)[1]
    assert cluster["rayVersion"] == pinned
    (workers,) = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(application["args"]["gpus"])
    assert workers["minReplicas"] == int(application["args"]["replicas"])
    assert workers["maxReplicas"] == int(application["args"]["max_replicas"])
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "serve", "containerPort": config["http_options"]["port"]} in head["ports"]


def test_the_rest_imports_without_the_server(monkeypatch):
    """Only the server imports the packages of its extra when it is imported itself."""
    package = ROOT / "src" / "arpg"
    settings = package / "serve" / "server_config.py"  # the defaults of the command's options
    files = [settings, *(path for path in package.rglob("*.py") if "serve" not in path.parts)]
    text = "\n".join(path.read_text() for path in files)
    assert not re.search(r"^\s*(import|from) (fastapi|starlette|uvicorn|pydantic|prometheus_client|ray)\b", text, re.M)
    outside = [p for p in (ROOT / "src" / "arpg").rglob("*.py") if "serve" not in p.parts and "cli" not in p.parts]
    assert not any("arpg.serve" in path.read_text() for path in outside)
    lines = (ROOT / "src" / "arpg" / "cli" / "serve.py").read_text().splitlines()
    assert not any(re.match(r"(import|from) arpg\.serve(?!\.server_config)", line) for line in lines)
    assert importlib.import_module("arpg.cli")


# The fields of Kubeflow's PyTorchJob and KubeRay's RayJob that the manifests use, with their types.
TEMPLATE = {"type": "object", "required": ["spec"]}
PYTORCHJOB = {
    "nprocPerNode": {"type": "string"},
    "elasticPolicy": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "rdzvBackend": {"enum": ["c10d", "etcd", "etcd-v2"]},
            "minReplicas": {"type": "integer"},
            "maxReplicas": {"type": "integer"},
            "maxRestarts": {"type": "integer"},
        },
    },
    "pytorchReplicaSpecs": {
        "type": "object",
        "propertyNames": {"enum": ["Master", "Worker"]},
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "required": ["template"],
            "properties": {
                "replicas": {"type": "integer"},
                "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                "template": TEMPLATE,
            },
        },
    },
}
RAY_START = {"type": "object", "additionalProperties": {"type": "string"}}
RAYJOB = {
    "entrypoint": {"type": "string"},
    "shutdownAfterJobFinishes": {"type": "boolean"},
    "backoffLimit": {"type": "integer"},
    "rayClusterSpec": {
        "type": "object",
        "additionalProperties": False,
        "required": ["headGroupSpec"],
        "properties": {
            "rayVersion": {"type": "string"},
            "headGroupSpec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["template"],
                "properties": {"rayStartParams": RAY_START, "template": TEMPLATE},
            },
            "workerGroupSpecs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["groupName", "template"],
                    "properties": {
                        "groupName": {"type": "string"},
                        "replicas": {"type": "integer"},
                        "minReplicas": {"type": "integer"},
                        "maxReplicas": {"type": "integer"},
                        "rayStartParams": RAY_START,
                        "template": TEMPLATE,
                    },
                },
            },
        },
    },
}


def known_options(verb):
    command = get_command(cli.app).commands[verb]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(
    ("name", "api", "kind", "spec"),
    [
        ("pytorchjob.yaml", "kubeflow.org/v1", "PyTorchJob", PYTORCHJOB),
        ("rayjob.yaml", "ray.io/v1", "RayJob", RAYJOB),
    ],
)
def test_the_jobs_fit_their_schemas_and_commands(name, api, kind, spec):
    (job,) = documents(name)
    assert (job["apiVersion"], job["kind"]) == (api, kind)
    jsonschema.validate(job["spec"], {"type": "object", "additionalProperties": False, "properties": spec})
    if kind == "PyTorchJob":
        groups = list(job["spec"]["pytorchReplicaSpecs"].values())
        (container,) = groups[0]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        words = container["command"][2:] + container["args"]
        policy = job["spec"]["elasticPolicy"]
        assert policy["minReplicas"] <= groups[0]["replicas"] <= policy["maxReplicas"]
        assert job["spec"]["nprocPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    else:
        cluster = job["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        words = shlex.split(job["spec"]["entrypoint"])
        assert "--ray" in words
    for group in groups:
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        kubernetes_validate.validate(template, "1.34", strict=True)
    assert words[0] == "arpg"
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known_options(words[1])


def test_the_slurm_script_starts_the_command():
    text = (DEPLOY / "train.slurm").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("exec srun torchrun"))
    words = shlex.split(line.replace('"${@:3}"', "").replace("$", ""))
    launcher, command = words[: words.index("-m")], words[words.index("-m") :]
    from torch.distributed.run import get_args_parser

    accepted = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert {word.split("=")[0] for word in launcher if word.startswith("--")} <= accepted
    assert command[1:3] == ["arpg", "train"]
    assert {word for word in command if word.startswith("-") and word != "-m"} <= known_options("train")
    assert "--resume" in command
