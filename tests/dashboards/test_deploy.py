"""The deployment files: they parse, they name files that exist and options that the sidecar has."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dashboards import build, infinity
from exporter.cli import app as sidecar
from sloscope.contract import load, parse
from tests.dashboards.conftest import promtool

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.rglob("*.y*ml"))


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return documents("compose.yaml")[0]


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return next(doc for doc in documents("kubernetes/sidecar.yaml") if doc["kind"] == "Deployment")["spec"]["template"]


def options(arguments: list[str]) -> dict[str, str]:
    """`--name=value` → name: value, after the subcommand."""
    assert arguments[0] == "sidecar"
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments[1:])


def test_promtool_accepts_the_scrape_configuration_with_its_rules() -> None:
    printed = promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    assert "1 rule files found" in printed


def test_the_rules_beside_it_are_those_of_the_contract_beside_it() -> None:
    made = build.rule_files(load(DEPLOY / "contract.toml"))
    assert list(build.differences(made, DEPLOY / "prometheus")) == []


def test_every_mounted_file_exists(compose: dict[str, Any]) -> None:
    sources = [mount.split(":")[0] for service in compose["services"].values() for mount in service["volumes"]]
    for source in sources:
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        else:
            assert source in compose["volumes"]


def test_every_option_that_is_given_is_one_that_the_sidecar_has(compose: dict[str, Any], pod: dict[str, Any]) -> None:
    known = {name.removeprefix("--") for param in typer.main.get_command(sidecar).params for name in param.opts}
    for arguments in (compose["services"]["sidecar"]["command"], pod["spec"]["containers"][0]["args"]):
        assert set(options(arguments)) <= known


def test_the_control_plane_is_on_loopback_or_has_a_token(compose: dict[str, Any], pod: dict[str, Any]) -> None:
    assert options(compose["services"]["sidecar"]["command"])["control"].startswith("127.0.0.1:")
    container = pod["spec"]["containers"][0]
    assert options(container["args"])["control"].startswith("0.0.0.0:")
    assert [entry["name"] for entry in container["env"]] == ["SLOSCOPE_TOKEN"]


def test_published_ports_are_on_loopback(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_prometheus_and_grafana_ask_where_the_control_plane_listens(compose: dict[str, Any]) -> None:
    control = options(compose["services"]["sidecar"]["command"])["control"]
    scrape = documents("prometheus/prometheus.yml")[0]["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": [control]}]
    sources = documents("grafana/provisioning/datasources/sloscope.yaml")[0]["datasources"]
    assert {source["type"]: source["url"] for source in sources} == {
        "prometheus": "http://127.0.0.1:9090",
        infinity.PLUGIN: f"http://{control}",
    }
    assert not any("uid" in source for source in sources)


def test_streams_may_end_before_the_pod_is_killed(compose: dict[str, Any], pod: dict[str, Any]) -> None:
    sidecar_drain = options(pod["spec"]["containers"][0]["args"])["drain"]
    assert int(sidecar_drain.removesuffix("s")) < pod["spec"]["terminationGracePeriodSeconds"]
    service = compose["services"]["sidecar"]
    assert int(options(service["command"])["drain"][:-1]) < int(service["stop_grace_period"][:-1])


def test_the_contract_in_the_manifest_is_the_one_of_the_deployment() -> None:
    config = next(doc for doc in documents("kubernetes/sidecar.yaml") if doc["kind"] == "ConfigMap")
    assert parse(config["data"]["contract.toml"]).hash == load(DEPLOY / "contract.toml").hash


def test_pages_and_tickets_have_a_receiver_each() -> None:
    config = documents("alertmanager/alertmanager.yml")[0]
    named = {config["route"]["receiver"], *(route["receiver"] for route in config["route"]["routes"])}
    assert named == {receiver["name"] for receiver in config["receivers"]} == {"page", "ticket"}


def test_the_image_carries_every_package_of_the_project() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for package in ("sloscope", "exporter", "reference_server", "queries", "dashboards"):
        assert f"COPY {package} {package}\n" in text
