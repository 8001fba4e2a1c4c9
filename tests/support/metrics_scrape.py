"""Metrics as Prometheus reads them."""

from collections.abc import Iterable
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Scraped:
    """What one look at /metrics brought."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: list[Sample] = [sample for family in self.families.values() for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[Sample]:
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """The sum over all that have these labels; there must be one."""
        found = self.all(name, **labels)
        assert found, f"{name} {labels} is not there"
        return sum(one.value for one in found)

    def values(self, name: str, label: str) -> dict[str, float]:
        return {one.labels[label]: one.value for one in self.all(name)}

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.samples}

    def labels(self, names: Iterable[str]) -> set[str]:
        wanted = set(names)
        return {label for one in self.samples if one.name in wanted for label in one.labels}


async def scrape(session: aiohttp.ClientSession, url: str, **options: Any) -> Scraped:
    async with session.get(f"{url}/metrics", **options) as response:
        assert response.status == 200, await response.text()
        return Scraped(await response.text())
