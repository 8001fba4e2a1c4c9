"""The manifests of the cluster size: what would only be noticed when a node does not start, or is stopped."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from anabranch.configuration.settings import VARIABLES, Settings, load
from conftest import Server

Serve = Callable[..., AbstractAsyncContextManager[Server]]

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE, KUBERNETES = DEPLOY / "compose", DEPLOY / "kubernetes" / "cluster"
# What a user makes of the examples.
OWN = {"cluster.env", "secret.yaml"}
FILES = sorted(path for folder in (COMPOSE, KUBERNETES) for path in folder.iterdir() if path.name not in OWN)
# What the server allows itself beyond the drain timeout (entrypoints/http/server.py).
AFTER_DRAIN_S = 10
SETTING = re.compile(r"AGGREGATOR_[A-Z_]+")
GIVEN = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")


class Strict(yaml.SafeLoader):
    """Refuses a key that is there twice: the second one would count silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


def mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor("tag:yaml.org,2002:map", mapping)


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(encoding="utf-8"), Strict))


def kinds() -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of Kubernetes by kind and name."""
    found = [one for path in FILES if path.parent == KUBERNETES for one in read(path) if one["kind"] != "Kustomization"]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


OBJECTS = kinds()
SET = OBJECTS["StatefulSet", "anabranch"]["spec"]
POD = SET["template"]["spec"]
[CONTAINER] = POD["containers"]
[CLUSTER] = read(COMPOSE / "cluster.yaml")
SERVICES: dict[str, dict[str, Any]] = CLUSTER["services"]
NODES = {name: one for name, one in SERVICES.items() if one.get("entrypoint") == ["anabranch", "serve"]}
EXAMPLE = dict(
    line.split("=", 1)
    for line in (COMPOSE / "cluster.env.example").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def kubernetes_environment() -> dict[str, str]:
    """The variables of a pod, with the Secret of the example."""
    secret = OBJECTS["Secret", "anabranch"]["stringData"]
    chosen = {one["name"]: secret.get(one["valueFrom"]["secretKeyRef"]["key"], "") for one in CONTAINER["env"]}
    return {**OBJECTS["ConfigMap", "anabranch"]["data"], **chosen}


def compose_environment(node: str) -> dict[str, str]:
    """The variables of a container, with cluster.env as in the example."""
    values = {name: str(value) for name, value in NODES[node]["environment"].items()}
    return {name: GIVEN.sub(lambda found: EXAMPLE.get(found[1], ""), value) for name, value in values.items()}


ENVIRONMENTS = {"kubernetes": kubernetes_environment(), **{name: compose_environment(name) for name in NODES}}


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration[:-1])


def grace_s(where: str) -> int:
    if where == "kubernetes":
        return int(POD["terminationGracePeriodSeconds"])
    return seconds(NODES[where]["stop_grace_period"])


@pytest.fixture(params=ENVIRONMENTS)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(where: str) -> Settings:
    return load(ENVIRONMENTS[where])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_setting_that_a_file_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {name for name in SETTING.findall(text) if name not in VARIABLES} == set()


def test_the_size_is_that_of_a_cluster(settings: Settings) -> None:
    assert settings.database_url is not None
    assert settings.index_url is not None
    assert settings.redis_url is not None
    assert settings.auth == "api_key"


def test_the_grace_period_is_longer_than_the_server_needs(settings: Settings, where: str) -> None:
    assert grace_s(where) > settings.shutdown_delay + settings.drain_timeout + AFTER_DRAIN_S


def test_an_accepted_question_can_end_before_the_server_stops(settings: Settings) -> None:
    assert settings.drain_timeout >= max(settings.total_timeout, settings.planner_timeout)


def asked_paths() -> Iterator[str]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert CONTAINER[name]["httpGet"]["port"] == "http"
        yield CONTAINER[name]["httpGet"]["path"]
    checks = [str(one["healthcheck"]["test"]) for one in (*NODES.values(), SERVICES["load-balancer"])]
    for check in checks:
        yield from re.findall(r"http://127\.0\.0\.1:\d+(/\w+)", check)
    yield from re.findall(r"health_uri (\S+)", (COMPOSE / "Caddyfile").read_text(encoding="utf-8"))


async def test_probes_ask_for_what_the_server_answers(serve: Serve) -> None:
    async with serve() as server:
        for path in sorted(set(asked_paths())):
            async with server.session.get(server.url + path) as response:
                assert response.status == 200, path
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health"  # a restart does not bring a database back
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_load_balancer_notices_a_stopping_node_before_its_port_is_closed() -> None:
    found = re.search(r"health_interval (\d+)s", (COMPOSE / "Caddyfile").read_text(encoding="utf-8"))
    assert found is not None
    delays = [load(ENVIRONMENTS[name]).shutdown_delay for name in NODES]
    assert all(int(found[1]) * 2 < delay for delay in delays)


def test_ports_are_that_of_the_server(settings: Settings) -> None:
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": settings.port}]
    upstreams = re.search(r"reverse_proxy (.+) \{", (COMPOSE / "Caddyfile").read_text(encoding="utf-8"))
    assert upstreams is not None
    assert upstreams[1].split() == [f"{name}:{settings.port}" for name in NODES]
    assert all(f"127.0.0.1:{settings.port}/" in str(one["healthcheck"]["test"]) for one in NODES.values())


def test_every_key_of_the_secret_is_in_the_example() -> None:
    used = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in CONTAINER["env"]}
    assert {one["name"] for one in used.values()} == {"anabranch"}
    assert all(name == one["key"] for name, one in used.items())
    assert used.keys() == OBJECTS["Secret", "anabranch"]["stringData"].keys()
    # Without them, a node would start with records, an index and limits of its own.
    needed = {name for name, one in used.items() if not one.get("optional")}
    assert needed == {"AGGREGATOR_DATABASE_URL", "AGGREGATOR_INDEX_URL", "AGGREGATOR_REDIS_URL"}


def test_every_variable_of_compose_is_in_the_example() -> None:
    text = (COMPOSE / "cluster.yaml").read_text(encoding="utf-8")
    used = {name: kind for name, kind, _ in GIVEN.findall(text)}
    assert used.keys() == EXAMPLE.keys()
    assert {name for name, kind in used.items() if kind == ":?"} == {"POSTGRES_PASSWORD", "VALKEY_PASSWORD"}


def test_everything_but_the_secret_is_applied() -> None:
    [kustomization] = read(KUBERNETES / "kustomization.yaml")
    others = {path.name for path in FILES if path.parent == KUBERNETES}
    assert set(kustomization["resources"]) == others - {"kustomization.yaml", "secret.example.yaml"}
    assert CONTAINER["image"] in {one["name"] for one in kustomization["images"]}


def test_selectors_find_the_pods() -> None:
    labels = SET["template"]["metadata"]["labels"]
    assert SET["selector"]["matchLabels"] == labels
    assert OBJECTS["PodDisruptionBudget", "anabranch"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["NetworkPolicy", "anabranch"]["spec"]["podSelector"]["matchLabels"] == labels
    services = [one["spec"] for (kind, _), one in OBJECTS.items() if kind == "Service"]
    assert all(one["selector"] == labels and one["ports"][0]["targetPort"] == "http" for one in services)
    assert ("Service", SET["serviceName"]) in OBJECTS


def mounted(mounts: Mapping[str, str], path: str) -> str:
    assert path in mounts
    return mounts[path]


def test_a_node_of_kubernetes_writes_only_where_it_may() -> None:
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["enableServiceLinks"] is False
    mounts = {one["mountPath"]: one["name"] for one in CONTAINER["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in SET["volumeClaimTemplates"]}
    assert mounted(mounts, ENVIRONMENTS["kubernetes"]["AGGREGATOR_DATA_DIR"]) in claims
    assert mounted(mounts, "/tmp") in {one["name"] for one in POD["volumes"]}


def test_each_node_of_compose_has_a_data_folder_of_its_own() -> None:
    folders = {name: str(one["volumes"][0]).split(":") for name, one in NODES.items()}
    assert len({volume for volume, _ in folders.values()}) == len(NODES) == 2
    for name, (volume, path) in folders.items():
        assert volume in CLUSTER["volumes"]
        assert path == ENVIRONMENTS[name]["AGGREGATOR_DATA_DIR"]
        assert NODES[name]["read_only"]
        assert NODES[name]["tmpfs"] == ["/tmp"]


def test_compose_reaches_everything_by_its_name() -> None:
    for name, one in NODES.items():
        addresses = [ENVIRONMENTS[name][f"AGGREGATOR_{what}_URL"] for what in ("DATABASE", "INDEX", "REDIS")]
        assert set(one["depends_on"]) == {urlsplit(address).hostname for address in addresses}
        assert all(SERVICES[other]["healthcheck"] for other in one["depends_on"])
        assert all("back" in SERVICES[other]["networks"] for other in (name, *one["depends_on"]))
    assert all(one["restart"] == "unless-stopped" for one in SERVICES.values())
    [subnet] = CLUSTER["networks"]["front"]["ipam"]["config"]
    assert all(ENVIRONMENTS[name]["AGGREGATOR_TRUSTED_PROXIES"] == subnet["subnet"] for name in NODES)
    assert SERVICES["load-balancer"]["networks"] == ["front"]


def test_what_holds_data_is_not_reached_from_outside() -> None:
    assert CLUSTER["networks"]["back"]["internal"]
    stores = {name: one for name, one in SERVICES.items() if one["networks"] == ["back"]}
    assert stores.keys() == {"postgres", "opensearch", "valkey"}
    assert not any("ports" in one for one in stores.values())
