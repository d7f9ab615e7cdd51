"""The store against the exposition text that a scraper reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sloscope import catalogue, contract
from sloscope.exposition import MetricStore, Row

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


Step = tuple[str, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("inc", "gauge", "observe", "many", "scrape")),
        st.sampled_from(("t", 'a "quoted" one', "back\\slash", "two\nlines", "ü", "")),
        st.integers(0, 2**62),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_text_is_what_prometheus_client_writes_whatever_changed_since_the_last_scrape(steps: list[Step]) -> None:
    store = MetricStore("sidecar", contract.preset("exercise"))
    rows: list[Row] = []
    store.add_source(lambda: rows)
    for what, tenant, number in steps:
        labels = ("interactive", "m", tenant)
        match what:
            case "inc":
                store.inc(OFFERED, number, labels)
            case "gauge":
                store.set("sloscope_journal_lag_seconds", number / 1e9, (tenant,))
            case "observe":
                store.observe(TTFT, number, labels)
            case "many":
                store.observe_many(TTFT, [number // 7] * 60, labels)
            case "scrape":
                buckets = [("-1.0" if number % 3 == 0 else "0.25", 3), ("2.5", number), ("+Inf", number + 0.5)]
                rows = [
                    Row("sloscope_upstream_engine_kv_usage_ratio", ("u", "vllm", tenant), 0.5),
                    Row("sloscope_upstream_engine_ttft_seconds", ("u", "vllm", tenant), number / 3, buckets),
                ]
                snapshot = store.snapshot()
                assert snapshot.render() == generate_latest(snapshot)
    snapshot = store.snapshot()
    assert snapshot.render() == generate_latest(snapshot)


def test_a_series_that_went_with_its_process_is_not_written_again() -> None:
    dead, scraped = MetricStore("sidecar"), MetricStore("sidecar")
    dead.inc(OFFERED, 7, LABELS)
    dead.observe(TTFT, 5, LABELS)
    scraped.absorb(dead.drain(full=True))
    assert b'tenant="t"' in scraped.render()
    scraped.absorb(MetricStore("sidecar").drain(full=True))
    assert b'tenant="t"' not in scraped.render()


def test_a_payload_in_pieces_is_of_one_moment_whatever_is_observed_between_them() -> None:
    here, there = MetricStore("sidecar"), MetricStore("sidecar")
    tenants = [("interactive", "m", f"t{number}") for number in range(40)]
    itl = "sloscope_sidecar_itl_seconds"
    for labels in tenants:
        here.observe_many(itl, [1] * 1500, labels)

    def request() -> None:
        for labels in tenants:
            here.inc(OFFERED, 1, labels)
            here.observe(TTFT, 5, labels)
            here.observe_many(itl, [20_000_000] * 699, labels)  # counted early at the first or second of them

    pieces, between = [], 0
    for piece in here.drain_in_pieces():
        pieces.append(piece)
        request()
        between += 1
    there.absorb(b"".join(pieces))
    seen = samples(there)
    # Counting takes 40 steps, one a series, each followed by a request; the moment is after it.
    of_moment = 40
    assert between > of_moment + 5
    for tenant in (f"t{number}" for number in range(40)):
        label = (("class", "interactive"), ("model", "m"), ("tenant", tenant))
        assert seen[OFFERED, label] == seen[TTFT + "_count", label] == of_moment
        assert seen[TTFT + "_sum", label] == pytest.approx(of_moment * 5e-9)
        assert seen[itl + "_count", label] == 1500 + 699 * of_moment
        assert seen[itl + "_sum", label] == pytest.approx(1500e-9 + 699 * of_moment * 0.02)
    there.absorb(here.drain())
    assert samples(there) == samples(here)


def test_a_payload_that_was_given_up_halfway_is_mended_by_a_full_one() -> None:
    here, there = MetricStore("sidecar"), MetricStore("sidecar")
    for number in range(100):
        here.observe(TTFT, number, ("interactive", "m", f"t{number}"))
    pieces = here.drain_in_pieces()
    for _ in range(103):
        next(pieces)
    del pieces
    there.absorb(here.drain(full=True))
    assert samples(there) == samples(here)


def test_no_step_of_a_payload_counts_or_writes_many_series() -> None:
    store = MetricStore("sidecar")
    append = store.appender(TTFT, LABELS)
    for value in range(9000):
        append(value)
    for number in range(200):
        store.observe(TTFT, 1, ("interactive", "m", f"t{number}"))
    left = [len(store._histogram(TTFT, LABELS).pending)]
    pieces = []
    for piece in store.drain_in_pieces():
        pieces.append(piece)
        left.append(len(store._histogram(TTFT, LABELS).pending))
    # 9000 values are counted 2000 at once.
    assert left[:7] == [9000, 7000, 5000, 3000, 1000, 0, 0]
    assert max(piece.count(b'"interactive"') for piece in pieces) == 16
    assert sum(piece.count(b'"interactive"') for piece in pieces) == 201


def test_a_sum_of_nanoseconds_above_64_bits_arrives_whole() -> None:
    here, there = MetricStore("sidecar"), MetricStore("sidecar")
    for _ in range(5):
        here.observe_many(TTFT, [2**62] * 50, LABELS)
    there.absorb(here.drain())
    # 250 * 2^62 ns
    assert value(there, TTFT + "_sum", **LABELLED) == 250 * 2**62 / 1e9


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
