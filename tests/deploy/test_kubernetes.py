"""The Kubernetes files and the Helm chart: rendered, validated, and held to what the server does."""

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from service.api.server import _FAREWELL_SECONDS
from service.metrics import Metrics
from service.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
CHART = ROOT / "deploy/helm/lacunar"
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
KUSTOMIZATIONS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]
# The validator knows Kubernetes' own kinds; these come with operators.
OPERATORS_KINDS = {"Gateway", "HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject"}
GPU_VALUES = {
    "device": {"kind": "cuda"},
    "monitoring": {"podMonitor": True, "rules": True},
    "settings": {"kv_cache_bytes": 4_000_000_000, "gpu_memory_utilization": 0.85, "status_page": False},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}
CHARTS: dict[str, dict[str, Any]] = {
    "chart": {},
    "chart, GPU": GPU_VALUES,
    "chart, least": {
        "apiKeys": {"secret": ""},
        "networkPolicy": {"enabled": False},
        "disruptionBudget": {"enabled": False},
    },
}


@functools.cache
def _rendered(name: str) -> list[dict[str, Any]]:
    if name in CHARTS:
        with helm_python.Chart.load(str(CHART)) as chart:
            texts = chart.render(CHARTS[name], name="release", namespace="place").values()
        return [document for text in texts for document in yaml.safe_load_all(text) if document]
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl renders the kustomizations, and there is none")
    result = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES / name)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


@pytest.fixture(params=[*KUSTOMIZATIONS, *CHARTS], scope="module")
def documents(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return _rendered(request.param)


def _one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (document,) = (document for document in documents if document["kind"] == kind)
    return document


def _pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return _one(documents, "Deployment")["spec"]["template"]["spec"]


def test_every_document_is_valid_kubernetes(documents):
    """Strict: a misspelt field is refused, not ignored as a cluster's API would."""
    assert documents
    for document in documents:
        if document["kind"] not in OPERATORS_KINDS:
            kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_pod_is_locked_down(documents):
    """As the image's own test runs it."""
    pod = _pod(documents)
    (container,) = pod["containers"]

    assert pod["automountServiceAccountToken"] is False
    assert _one(documents, "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/cache/lacunar", "/tmp", "/dev/shm"}


def test_a_leaving_pod_has_time_to_drain(documents):
    """SIGTERM comes after preStop, and SIGKILL when the grace period ends, preStop included."""
    pod = _pod(documents)
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(variables["LACUNAR_DRAIN_SECONDS"])

    # The farewell is waited for up to three times: open requests, the server, the admin server.
    assert pod["terminationGracePeriodSeconds"] > sleep + drain + 3 * _FAREWELL_SECONDS


def test_settings_are_known_and_allowed(documents):
    """An unknown or impossible setting stops the start."""
    (container,) = _pod(documents)["containers"]
    values = {entry["name"].removeprefix("LACUNAR_").lower(): entry["value"] for entry in container["env"]}
    settings = Settings(model="/models/model", **values)

    assert settings.admin_port == 9100
    assert container["args"][0] == "serve"


def test_probes_ask_routes_of_their_own_on_the_admin_port(documents):
    """The three questions differ, and clients cannot fill the admin port."""
    (container,) = _pod(documents)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}

    assert ports == {"http": 8000, "metrics": 9100}
    assert {probe["port"] for probe in asked.values()} == {"metrics"}
    assert [probe["path"] for probe in asked.values()] == ["/health", "/livez", "/readyz"]


def test_selectors_choose_the_pods(documents):
    """An empty selector would choose every pod of the namespace, a wrong one none."""
    labels = _one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [_one(documents, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors.append(_one(documents, "Service")["spec"]["selector"])
    for document in documents:
        if document["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            selectors.append(document["spec"]["selector"]["matchLabels"])
        if document["kind"] == "NetworkPolicy":
            selectors.append(document["spec"]["podSelector"]["matchLabels"])
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()


def test_rules_are_those_of_prometheus(documents):
    """The alerts are tested once, with promtool, and must not differ elsewhere."""
    rules = [document["spec"] for document in documents if document["kind"] == "PrometheusRule"]

    assert all(spec == RULES for spec in rules)


@pytest.mark.parametrize("name", ["overlays/gpu", "chart, GPU"])
def test_monitoring_brings_the_rules_and_the_monitor(name):
    """The test above has something to compare."""
    kinds = {document["kind"] for document in _rendered(name)}

    assert {"PrometheusRule", "PodMonitor"} <= kinds


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("overlays/gpu", "nvidia.com/gpu"),
        ("overlays/mig", "nvidia.com/mig-3g.71gb"),
        ("overlays/time-slicing", "nvidia.com/gpu.shared"),
        ("chart, GPU", "nvidia.com/gpu"),
    ],
)
def test_a_gpu_replica_asks_for_one_device(name, resource):
    """And for no second kind of it."""
    pod = _pod(_rendered(name))
    limits = pod["containers"][0]["resources"]["limits"]

    assert {key: value for key, value in limits.items() if "/" in key} == {resource: 1}
    assert pod["runtimeClassName"] == "nvidia"


def test_time_slices_share_the_memory():
    """Nothing else keeps the replicas on one GPU apart."""
    documents = _rendered("overlays/time-slicing")
    environment = {entry["name"]: entry["value"] for entry in _pod(documents)["containers"][0]["env"]}
    plugin = yaml.safe_load(_one(documents, "ConfigMap")["data"]["any"])
    (slices,) = plugin["sharing"]["timeSlicing"]["resources"]

    assert _one(documents, "Deployment")["spec"]["replicas"] == slices["replicas"]
    assert slices["replicas"] * float(environment["LACUNAR_GPU_MEMORY_UTILIZATION"]) < 1


def test_keda_scales_on_metrics_that_exist():
    """A query without data would leave the deployment as it is, whatever the load."""
    documents = _rendered("overlays/keda")
    (trigger,) = _one(documents, "ScaledObject")["spec"]["triggers"]
    known = {family.name for family in Metrics().registry.collect()}
    named = set(re.findall(r"\blacunar_\w+", trigger["metadata"]["query"]))

    assert named == {"lacunar_sequences_running", "lacunar_sequences_waiting"}
    assert named <= known
    assert "replicas" not in _one(documents, "Deployment")["spec"]


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3},
        {"device": {"kind": "tpu"}},
        {"settings": {"port": 9000}},
        {"settings": {"maxQueue": 1}},
        {"image": {"digest": "sha256:1"}},
        {"drain": {"preStopSeconds": 0}},
    ],
)
def test_the_chart_refuses_values_it_does_not_know(values):
    """values.schema.json finds the mistake before the cluster does."""
    with helm_python.Chart.load(str(CHART)) as chart, pytest.raises(helm_python.HelmError):
        chart.render(values, name="release", namespace="place")
