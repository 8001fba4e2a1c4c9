"""The dashboard and the alerts use metrics and labels that a real server exports."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Endpoint
from anabranch.testing import Space
from anabranch.testing.failures import Failure
from conftest import Server, ref
from support.metrics_scrape import Scraped, scrape

Serve = Callable[..., AbstractAsyncContextManager[Server]]

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "anabranch.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
# What Prometheus itself says of those that it reads, and puts on all that it has read.
ITS_OWN = {"up"}
ITS_LABELS = {"instance", "job"}
NOBODY = "http://127.0.0.1:9"

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
SELECTED = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
MATCHER = re.compile(r"\s*(\w+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
NAME = re.compile(r"(?<![\w:])[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()")
WINDOW = re.compile(r"\[[^\]]*\]")
WORDS = {"and", "or", "unless", "offset", "bool"}


class Used(NamedTuple):
    """What a PromQL expression asks for: each metric with the labels that it is chosen by, and those that are left."""

    metrics: dict[str, set[str]]
    grouped: set[str]


def used(expression: str) -> Used:
    plain = WINDOW.sub("", STRING.sub("", expression))
    metrics: dict[str, set[str]] = {}
    for name, matchers in SELECTED.findall(plain):
        metrics.setdefault(name, set()).update(MATCHER.findall(matchers))
    plain = SELECTED.sub(r"\1", plain)
    grouped = {label.strip() for labels in GROUPED.findall(plain) for label in labels.split(",")} - {""}
    for name in NAME.findall(GROUPED.sub("", plain)):
        if name not in WORDS:
            metrics.setdefault(name, set())
    return Used(metrics, grouped)


def panels() -> Iterator[tuple[str, str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "5m")
            yield f"{panel['title']} {target['refId']}", expression, target["legendFormat"]


EXPRESSIONS = {title: expression for title, expression, _ in panels()} | {
    rule["alert"]: rule["expr"] for rule in ALERTS
}


def test_the_promql_parser_of_this_test() -> None:
    text = 'sum by (le, a) (rate(x_bucket{b=~"c|d{}",e!="by (f)"}[5m])) / on (a) max(y) > 2 and z offset 5m'
    assert used(text) == Used({"x_bucket": {"b", "e"}, "y": set(), "z": set()}, {"le", "a"})


@pytest.fixture(scope="module")
def exported() -> dict[str, Scraped]:
    return {}


@pytest.fixture
async def scraped(serve: Serve, exported: dict[str, Scraped]) -> Scraped:
    """What a server says that has had its share of trouble."""
    if "all" not in exported:
        exported["all"] = await _troubled(serve)
    return exported["all"]


async def _troubled(serve: Serve) -> Scraped:
    """It reaches neither its Redis, nor the first address of a source, nor its MCP server; another source and a model
    fail, one is busy."""
    limited = {"redis_url": NOBODY.replace("http", "redis"), "rate_limit_surfaces": ("chat",)}
    async with Space(everything=True) as space:
        space.fails("busy", Failure.STATUS_429, retry_after_s=0)
        mirror = Endpoint(slug="docs", url=NOBODY, alternate=space.url, operator=True)
        library = {"library": McpServer(name="library", command="no-such-command-anywhere")}
        given = {**limited, "sources": {"mirror": mirror}, "mcp_servers": library}
        async with serve(**given, breaker_calls=1, model_retries=1) as server:

            async def ask(*sources: dict[str, Any], model: str = "scribe") -> int:
                request = {"prompt": "?", "model": ref(space, model, "mia"), "data_sources": sources}
                return (await server.post("/api/v1/chat", request))[0]

            assert await ask({"slug": "mirror"}, ref(space, "status-403", "bob")) == 200
            assert await ask(ref(space, "status-500", "bob"), model="status-500") == 502
            assert await ask(model="busy") == 502
            # The operator on this machine has no rate limit.
            assert (await server.post("/api/v1/chat", {"prompt": "?"}, headers={"Via": "1.1 proxy"}))[0] == 200
            return await scrape(server.session, server.url)


@pytest.mark.parametrize("where", EXPRESSIONS)
async def test_every_metric_in_rules_and_dashboards_is_exported(scraped: Scraped, where: str) -> None:
    metrics, grouped = used(EXPRESSIONS[where])
    assert metrics, "an expression asks for something"
    for name, labels in metrics.items():
        if name in ITS_OWN:
            assert labels <= ITS_LABELS
            continue
        assert name in scraped.names, name
        assert labels <= scraped.labels([name]) | ITS_LABELS, name
    assert grouped <= scraped.labels(metrics) | ITS_LABELS


async def test_every_label_value_in_rules_and_dashboards_exists(scraped: Scraped) -> None:
    for where, expression in EXPRESSIONS.items():
        for name, matchers in SELECTED.findall(expression):
            if name in ITS_OWN:
                continue
            for label, values in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
                known = {one.labels[label] for one in scraped.all(name)}
                assert set(values.split("|")) <= known, f"{where}: {name} {label}"


def test_dashboard_legends_use_labels_of_their_expression() -> None:
    for title, expression, legend in panels():
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= used(expression).grouped, title


def test_the_dashboard_names_no_data_source() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    shown = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in shown)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = [
        (panel["gridPos"]["y"] + down, panel["gridPos"]["x"] + right)
        for panel in DASHBOARD["panels"]
        for down in range(panel["gridPos"]["h"])
        for right in range(panel["gridPos"]["w"])
    ]
    assert len(set(taken)) == len(taken), "no panel lies on another"
    assert max(right for _, right in taken) < 24


async def test_every_exported_metric_has_a_panel(scraped: Scraped) -> None:
    drawn = {_family(name) for _, expression, _ in panels() for name in used(expression).metrics}
    assert {_family(name) for name in scraped.names} == drawn


def test_every_alert_has_a_severity_and_a_runbook() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith((".", ")."))
        assert re.fullmatch(r"docs/operations\.md#[a-z-]+", rule["annotations"]["runbook_url"])
        assert re.fullmatch(r"\d+m", rule["for"])
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


@pytest.mark.parametrize(
    ("alert", "measured", "limit"),
    [
        ("AnabranchRagErrors", r"sum\(rate\(rag_stream_errors_total.*/ sum\(rate\(rag_stream_requests_total", "> 0.05"),
        ("AnabranchRetrievalSlow", r"histogram_quantile\(0\.95, .*rag_retrieval_latency_ms_bucket", "> 2000"),
        ("AnabranchCacheHitsFew", r"sum\(rate\(rag_cache_hit_total.*/ \(.*rag_cache_miss_total", "< 0.3"),
    ],
)
def test_alerts_have_the_limits_of_the_specification(alert: str, measured: str, limit: str) -> None:
    """Spec 4: errors over 5%, p95 of the retrieval over 2000 ms, cache hits under 30%."""
    [rule] = [rule for rule in ALERTS if rule["alert"] == alert]
    compared, _, _ = " ".join(rule["expr"].split()).partition(" and ")
    assert re.match(measured, compared)
    assert compared.endswith(f" {limit}")


def test_every_runbook_link_exists() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations.md"
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    assert {rule["annotations"]["runbook_url"].partition("#")[2] for rule in ALERTS} <= anchors


def test_the_prometheus_example_loads_the_rules() -> None:
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    (job,) = PROMETHEUS["scrape_configs"]
    assert {job["job_name"]} == set(re.findall(r'job="(\w+)"', " ".join(EXPRESSIONS.values())))


def _family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)
