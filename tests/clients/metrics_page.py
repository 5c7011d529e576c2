"""Parses `/metrics` pages, and the tables of docs/metrics.md."""

import re
import urllib.request
from dataclasses import dataclass, field

from conftest import ROOT

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass
class Family:
    """One metric: its type and its samples, each with a suffix, labels and a value."""

    kind: str
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    @property
    def labels(self) -> set[str]:
        """Names of labels, except those of buckets and quantiles."""
        return {name for _, labels, _ in self.samples for name in labels} - {"le", "quantile"}

    def value(self, suffix: str = "", **labels: str) -> float:
        """The sum over samples with these labels."""
        found = [value for other, own, value in self.samples if other == suffix and labels.items() <= own.items()]
        assert found, f"no sample with {suffix!r} {labels}"
        return sum(found)


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        return response.read().decode()


def families(text: str) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in found, f"{name} appears twice"
            found[name] = Family(kind)
        elif line and not line.startswith("#"):
            name, labels, value = SAMPLE.match(line).groups()
            family = name if name in found else re.sub("_(bucket|sum|count)$", "", name)
            found[family].samples.append((name[len(family) :], dict(LABEL.findall(labels or "")), float(value)))
    return found


def documented() -> dict[str, tuple[str, set[str], bool]]:
    """For each metric in docs/metrics.md: type, labels, and whether it needs a GPU."""
    rows = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            labels = set(re.findall(r"`([a-z_]+)`", cells[2]))
            rows[cells[0].strip("`")] = (cells[1], labels, "GPU" in cells[2])
    return rows
