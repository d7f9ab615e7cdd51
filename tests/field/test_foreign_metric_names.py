"""Names of engine metrics as real files hold them: each is understood, or known not to be mapped and why."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from exporter.engine_metrics import LabelLimit, read
from sloscope.foreign_names import FAMILY_PREFIX, NOT_MAPPED, SOURCES

_NAME = re.compile(r"\b(?:vllm|sglang|llamacpp):[a-z_0-9]+|\btgi_[a-z_0-9]+")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total")
FOLDERS = ("prometheus", "grafana")


def known() -> set[str]:
    return {name for source in SOURCES for name in source.spellings()} | NOT_MAPPED.keys()


def is_known(name: str) -> bool:
    """A query may leave `_total` out or put a histogram's suffix behind."""
    return any(spelling in known() for spelling in (name, *(name.removesuffix(suffix) for suffix in _SUFFIXES)))


@pytest.fixture(scope="module")
def names(field_data: Path) -> set[str]:
    found: set[str] = set()
    for folder in FOLDERS:
        for path in sorted((field_data / folder).iterdir()):
            found |= set(_NAME.findall(path.read_text(encoding="utf-8")))
    return found


def test_every_name_in_the_files_is_mapped_or_known_not_to_be(names: set[str]) -> None:
    assert len(names) > 70
    assert sorted(name for name in names if not is_known(name)) == []


def test_most_mapped_names_of_vllm_and_sglang_are_seen_in_use(names: set[str]) -> None:
    """What no file holds is an older or a newer name than theirs, and is listed here."""
    bases = {name.removesuffix("_total") for name in names}
    bases |= {name.removesuffix(suffix) for name in names for suffix in _SUFFIXES}
    mapped = {
        name.removesuffix("_total") for source in SOURCES if source.kind in ("vllm", "sglang") for name in source.names
    }
    assert mapped - bases == {
        "sglang:cached_tokens",
        "sglang:inter_token_latency_seconds",
        "sglang:num_requests",
        "sglang:num_retracted_requests",
        "sglang:queue_time_seconds",
    }


def test_a_real_scrape_of_sglang_is_read_to_the_last_sample(field_data: Path) -> None:
    page = (field_data / "prometheus" / "sglang_production_metrics.md").read_text(encoding="utf-8")
    scrape = page.split("```")[1].partition("\n")[2].partition("\n")[2]  # without the command that asked for it
    found = read(scrape, LabelLimit(50))
    assert found.skipped == {}
    assert found.lines == sum(1 for line in scrape.splitlines() if line and not line.startswith("#"))
    labels = ("sglang", "meta-llama/Llama-3.1-8B-Instruct")
    assert found.values[f"{FAMILY_PREFIX}requests_running", labels] == 162
    assert found.values[f"{FAMILY_PREFIX}requests_waiting", labels] == 2826
    assert found.values[f"{FAMILY_PREFIX}generation_tokens_total", labels] == 7557572
    ttft = found.histograms[f"{FAMILY_PREFIX}ttft_seconds", labels]
    assert (ttft.counts[0.04], ttft.counts[30.0], ttft.counts[math.inf]) == (1, 2513, 11008)
    assert ttft.sum == pytest.approx(2351897.94, abs=0.01)
    # The older name for the gap between tokens: as many samples as tokens, not as requests.
    gaps = found.histograms[f"{FAMILY_PREFIX}token_interval_seconds", labels]
    assert gaps.counts[math.inf] == 7400757


def test_a_proxy_that_is_no_engine_gives_nothing(field_data: Path) -> None:
    found = read((field_data / "prometheus" / "litellm_1.95_excerpt.txt").read_text(encoding="utf-8"), LabelLimit(50))
    assert not found.understood and found.lines == 9 and found.skipped == {}
