"""The store against the exposition text that a scraper reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sloscope import catalogue, contract
from sloscope.exposition import MetricStore

LABELS = ("interactive", "m", "t")
TTFT = "sloscope_sidecar_ttft_seconds"
OFFERED = "sloscope_sidecar_requests_offered_total"


def samples(store: MetricStore) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = store.render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(store: MetricStore, name: str, **labels: str) -> float:
    return samples(store)[name, tuple(sorted(labels.items()))]


LABELLED = {"class": "interactive", "model": "m", "tenant": "t"}


def test_a_value_at_exactly_the_limit_is_in_the_limits_bucket() -> None:
    store = MetricStore("sidecar", contract.parse("version=1\n[classes.a]\nttft='333ms'"))
    store.observe(TTFT, 333_000_000, LABELS)
    store.observe(TTFT, 333_000_001, LABELS)
    assert value(store, TTFT + "_bucket", le="0.333", **LABELLED) == 1
    assert value(store, TTFT + "_bucket", le="+Inf", **LABELLED) == 2
    assert value(store, TTFT + "_sum", **LABELLED) == pytest.approx(0.666000001)


@given(st.lists(st.integers(0, 10**12), max_size=60))
def test_bins_agree_with_counting_one_by_one(values: list[int]) -> None:
    store = MetricStore("sidecar", contract.preset("exercise"))
    append = store.appender(TTFT, LABELS)
    for item in values[: len(values) // 2]:
        append(item)
    store.render()  # a scrape in between
    store.observe_many(TTFT, values[len(values) // 2 :], LABELS)
    seen = samples(store)
    for edge in catalogue.edges_ns(catalogue.get(TTFT), contract.preset("exercise")):
        key = (TTFT + "_bucket", tuple(sorted({"le": str(edge / 1e9), **LABELLED}.items())))
        assert seen[key] == sum(item <= edge for item in values)


def test_draining_and_absorbing_gives_the_same_exposition_even_when_a_payload_is_lost() -> None:
    here, there = MetricStore("sidecar"), MetricStore("sidecar")
    here.inc(OFFERED, 2, LABELS)
    here.observe(TTFT, 5, LABELS)
    here.drain()  # lost on the way
    here.inc(OFFERED, 1, LABELS)
    there.absorb(here.drain(full=True))
    assert samples(there) == samples(here)
    here.inc(OFFERED, 1, LABELS)
    payload = here.drain()
    there.absorb(payload)
    there.absorb(payload)  # taking one twice does no harm
    assert samples(there) == samples(here)


def test_a_full_payload_forgets_the_series_of_a_process_that_died() -> None:
    dead, new, scraped = MetricStore("sidecar"), MetricStore("sidecar"), MetricStore("sidecar")
    dead.inc(OFFERED, 7, ("gone", "m", "t"))
    scraped.absorb(dead.drain(full=True))
    new.inc(OFFERED, 1, LABELS)
    scraped.absorb(new.drain(full=True))
    assert samples(scraped) == samples(new)


def test_a_counter_of_both_sides_is_their_sum_and_a_gauge_is_of_the_side_that_set_it() -> None:
    here, there = MetricStore("server"), MetricStore("server")
    here.inc("sloscope_journal_records_total", 5, ("engine",))
    here.set("sloscope_engine_undelivered_tokens", 9)  # at the other side it is 0 from the start, and was never set
    for written in (7, 8):
        there.inc("sloscope_journal_records_total", written, ("engine",))
        there.set("sloscope_engine_kv_blocks_cached", 3)
        here.absorb(there.drain())
    here.inc("sloscope_journal_records_total", 1, ("engine",))
    text = here.render().decode()
    # 5 + 1 of its own, 7 + 8 of the other side
    assert '\nsloscope_journal_records_total{observer="engine"} 21.0\n' in text
    assert "\nsloscope_engine_kv_blocks_cached 3.0\n" in text
    assert "\nsloscope_engine_undelivered_tokens 9.0\n" in text


def test_a_flood_of_tenants_ends_in_other() -> None:
    store = MetricStore("sidecar", max_label_values=3)
    seen = [store.bounded("tenant", f"t{i}") for i in range(10)]
    assert seen == ["t0", "t1", "t2"] + ["other"] * 7
    assert store.bounded("tenant", "t1") == "t1"


def test_children_without_labels_exist_from_the_start() -> None:
    assert value(MetricStore("server"), "sloscope_engine_preemptions_total") == 0
    assert value(MetricStore("server"), "sloscope_engine_queue_seconds_count") == 0


def test_a_name_outside_the_catalogue_is_a_bug() -> None:
    with pytest.raises(KeyError):
        MetricStore("server").inc("sloscope_sidecar_requests_offered_total")  # not a server metric
