"""Which children stand before anything happened: what appears with its first event loses it in rate()."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.control_plane import ControlPlane
from exporter.families import ReceiptFamilies
from exporter.observation import PROBLEM_NAMES
from exporter.receipts import CAUSES
from sloscope.clock import SystemClock
from sloscope.contract import parse
from sloscope.exposition import MetricStore
from tests.exporter.harness import answering, bench, children, finish, run, settings_for

CONTRACT = """
version = 1
default_class = "chat"
[classes.chat]
ttft = "300ms"
itl_max = "30ms"
[classes.batch]
e2e = "5s"
min_tokens = 2
"""
ENDS = {
    ("completed", ""),
    *(
        ("failed", reason)
        for reason in (
            "rejected", "http_error", "connect_error", "in_band_error", "truncated", "empty_stream", "upstream_reset",
            "timeout", "bad_stream",
        )
    ),
    *(("cancelled", reason) for reason in ("voluntary", "client_timeout", "disconnect", "slow_reader")),
    ("unfinished", "recorder_lost"),
    ("unfinished", "window_closed"),
}  # fmt: skip


@pytest.mark.parametrize("point", ["client", "sidecar"])
def test_every_way_to_end_has_its_series_in_the_moment_of_the_first_offer(point: str) -> None:
    store = MetricStore("sidecar", parse(CONTRACT))
    families = ReceiptFamilies(store, point, parse(CONTRACT))
    families.begun("batch", "a-model", "a-tenant")
    families.begun("_unknown", "a-model", "a-tenant")
    for class_name, model, tenant, obligations in (
        ("chat", "unknown", "default", {"outcome", "ttft", "itl_max"}),  # from the start
        ("batch", "unknown", "default", {"outcome", "e2e", "min_tokens"}),
        ("batch", "a-model", "a-tenant", {"outcome", "e2e", "min_tokens"}),
        ("_unknown", "a-model", "a-tenant", {"outcome", "class"}),
    ):
        mine = {"class": class_name, "model": model, "tenant": tenant}
        ended = children(store, f"sloscope_{point}_requests_total", **mine)
        assert {(labels["outcome"], labels["reason"]) for labels in ended} == ENDS
        misses = children(store, f"sloscope_{point}_contract_misses_total", **mine)
        assert {labels["obligation"] for labels in misses} == obligations
        tokens = children(store, f"sloscope_{point}_output_tokens_total", **mine)
        assert {labels["qualified"] for labels in tokens} == {"true", "false"}
        for name in ("requests_offered_total", "requests_qualified_total", "inflight_requests", "ttft_seconds_count"):
            assert len(children(store, f"sloscope_{point}_{name}", **mine)) == 1


def test_the_troubles_of_a_data_plane_have_their_series_from_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(finish())) as b:
            names = {labels["problem"] for labels in children(b.plane.store, "sloscope_parse_problems_total")}
            assert names == set(PROBLEM_NAMES)

    run(test())


def test_every_cause_to_refuse_a_receipt_has_its_series_from_the_start(tmp_path: Path) -> None:
    plane = ControlPlane(settings_for(tmp_path, "/none", ("http://a",)), SystemClock())
    causes = {labels["cause"] for labels in children(plane.store, "sloscope_receipts_rejected_total")}
    assert causes == set(CAUSES)
    plane.receipts.close()
