"""The three ledgers, against the numbers of the source, and what must hold for any numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.plan import ledger
from kvd.plan.capacity import CapacityPlan
from kvd.plan.footprint import Footprint
from kvd.plan.network import NetworkPlan, TrafficMatrix, uniform_matrix
from kvd.plan.objects import ObjectsPlan
from kvd.plan.units import GIB, MIB, TIB, parse_bandwidth

CAPACITY = CapacityPlan(
    prefixes_count=32_768,
    prefix_tokens=8_192,
    footprint=Footprint.by_hand(131_072, 4),
    chunk_tokens=256,
    replicas_count=2,
    hosts_count=128,
    dram_per_host_bytes=512 * GIB,
    usable_share=Fraction(4, 5),
)
OBJECTS = ObjectsPlan(
    prefixes_count=32_768, prefix_tokens=8_192, footprint=Footprint.by_hand(131_072, 4), chunk_tokens=256
)
NETWORK = NetworkPlan(
    requests_per_s=Fraction(200),
    hit_share=Fraction(3, 4),
    bytes_per_hit=GIB,
    link_bytes_per_s=parse_bandwidth("400Gbit"),
    efficiency=Fraction(13, 20),
    stores_per_s=Fraction(50),
    replicas_count=2,
)


def test_capacity_of_the_source() -> None:
    assert CAPACITY.prefix_bytes == GIB
    assert CAPACITY.unique_bytes == 32 * TIB
    assert CAPACITY.demand_bytes == 64 * TIB
    assert CAPACITY.usable_bytes == Fraction(512, 10) * TIB
    assert not CAPACITY.fits
    assert CAPACITY.hosts_min == 160
    assert (
        "does not fit: 64 TiB are needed and 128 hosts have 51.2 TiB; it takes at least 160"
        in CAPACITY.conclusion
    )


def test_one_host_has_and_several_have() -> None:
    alone = replace(CAPACITY, hosts_count=1, replicas_count=1, spare_hosts=0)
    assert "1 host has 409.6 GiB" in alone.conclusion
    assert "1 host × 409.6 GiB" in [step.expression for step in alone.steps]


def test_160_hosts_are_exactly_enough_and_leave_nothing() -> None:
    plan = replace(CAPACITY, hosts_count=160)
    assert plan.usable_bytes == plan.demand_bytes == 64 * TIB
    assert (plan.fits, plan.headroom_bytes, plan.fits_after_loss) == (True, 0, False)
    assert "fits exactly on 160 hosts, with no headroom" in plan.conclusion
    assert "(that takes 161)" in plan.conclusion
    assert replace(plan, hosts_count=161).fits_after_loss
    assert not replace(plan, hosts_count=159).fits


def test_objects_of_the_source() -> None:
    assert OBJECTS.object_bytes == 8 * MIB
    assert OBJECTS.objects_count == 4_194_304
    assert OBJECTS.metadata_bytes == 2 * GIB
    eighth = replace(OBJECTS, chunk_tokens=32)
    assert eighth.objects_count == 8 * OBJECTS.objects_count
    assert eighth.metadata_bytes == 8 * OBJECTS.metadata_bytes
    assert "is an assumption" in OBJECTS.assumptions[0]


def test_own_metadata_is_per_family_and_only_shown_when_measured() -> None:
    assert OBJECTS.own_metadata_bytes is None
    assert "metadata of kvd" not in [step.label for step in OBJECTS.steps]
    measured = replace(OBJECTS, metadata_per_family_bytes=400)
    assert measured.own_metadata_bytes == 1_048_576 * (400 + 3 * 48)  # four objects a family
    assert replace(measured, footprint=Footprint.by_hand(131_072)).own_metadata_bytes == 1_048_576 * 400
    assert "544 MiB as kvd keeps it" in measured.conclusion


def test_partial_chunks_at_the_tail_are_not_objects() -> None:
    plan = replace(OBJECTS, prefixes_count=1, prefix_tokens=8_191)
    assert (plan.families_count, plan.tail_tokens) == (31, 255)
    assert "255 tokens" in plan.assumptions[2]


def test_shared_beginnings_are_stored_once() -> None:
    plan = replace(CAPACITY, shared_tokens=8_192)
    assert plan.unique_bytes == GIB
    assert replace(OBJECTS, shared_tokens=8_192).families_count == 32
    assert replace(OBJECTS, shared_tokens=600).families_count == 32_768 * 30 + 2


def test_network_of_the_source() -> None:
    assert NETWORK.read_bytes_per_s == 150 * GIB
    assert NETWORK.write_bytes_per_s == 100 * GIB
    shown = {step.label: step.text for step in NETWORK.steps}
    assert shown["one link, nominal"] == "≈ 46.57 GiB/s"
    assert shown["one link, in practice"] == "≈ 30.27 GiB/s"
    assert NETWORK.links_per_node_min == NETWORK.read_links_min == 5
    assert NETWORK.write_links_min == 4
    assert "a bound, not an SLO verdict" in NETWORK.conclusion


def test_traffic_is_directed() -> None:
    """Adding both directions up would ask for 9 links where 5 carry it."""
    matrix = NETWORK.matrix
    assert matrix.bytes_per_s == ((0, 150 * GIB), (100 * GIB, 0))
    assert matrix.busiest_bytes_per_s == 150 * GIB


@pytest.mark.parametrize(("links", "carries"), [(4, False), (5, True)])
def test_links_there_are(links: int, carries: bool) -> None:
    plan = replace(NETWORK, links_count=links)
    assert plan.carries is carries
    assert ("cannot carry it" in plan.conclusion) is not carries
    assert (plan.utilisation_share <= 1) is carries


def test_a_hot_owner_sends_more_than_its_share() -> None:
    even = uniform_matrix(4, Fraction(120), Fraction(0))
    assert even.egress_bytes_per_s == even.ingress_bytes_per_s == (30, 30, 30, 30)
    hot = uniform_matrix(4, Fraction(120), Fraction(0), Fraction(1, 2))
    assert hot.egress_bytes_per_s == (60, 20, 20, 20)
    assert sum(hot.egress_bytes_per_s) == 120
    plan = replace(NETWORK, hosts_count=4, local_share=Fraction(1, 5), hot_share=Fraction(2, 5))
    assert plan.matrix.egress_bytes_per_s[0] == 73 * GIB
    assert plan.links_per_node_min == 3


def test_the_busiest_direction_may_be_what_a_node_receives() -> None:
    zero, ten = Fraction(0), Fraction(10)
    matrix = TrafficMatrix(("a", "b", "c"), ((zero, zero, ten), (zero, zero, ten), (zero, zero, zero)))
    assert matrix.busiest_bytes_per_s == 20


def test_no_traffic_needs_no_links() -> None:
    plan = replace(NETWORK, requests_per_s=Fraction(0), stores_per_s=Fraction(0))
    assert (plan.links_per_node_min, plan.utilisation_share) == (0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefixes_count": 0}, "prefixes = 0 is below 1"),
        ({"prefixes_count": -5}, "prefixes = -5 is below 1"),
        ({"usable_share": Fraction(0)}, "--usable = 0 must be greater than 0"),
        ({"usable_share": Fraction(3, 2)}, "--usable = 3/2 is above 1"),
        ({"usable_share": 0.8}, "not exact"),
        ({"replicas_count": 129}, "--replicas = 129 with --hosts = 128"),
        ({"shared_tokens": 8_193}, "--shared-tokens = 8193 is more than a prefix of 8192"),
        ({"spare_hosts": 128}, "none would be left"),
        ({"prefixes_count": 1 << 60}, "unique KV with copies"),
    ],
)
def test_capacity_refuses(change: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(CAPACITY, **change)  # type: ignore[arg-type]
    assert says in caught.value.message
    assert "allowed" in caught.value.message or "must be" in caught.value.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunk_tokens": 8_193}, "nothing would ever be stored"),
        ({"footprint": Footprint.by_hand(131_072, 3)}, "does not divide"),
        ({"metadata_per_object_bytes": -1}, "--metadata = -1"),
        ({"metadata_per_family_bytes": -1}, "metadata per family = -1"),
        ({"shared_tokens": 8_193}, "--shared-tokens = 8193"),
    ],
)
def test_objects_refuses(change: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(OBJECTS, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"link_bytes_per_s": Fraction(0)}, "link = 0 must be greater than 0"),
        ({"local_share": Fraction(1, 2)}, "--local = 50 % without a number of hosts"),
        ({"hot_share": Fraction(1, 2)}, "--hot = 50 % without a number of hosts"),
        ({"hosts_count": 257}, "hosts = 257 is above 256"),
        ({"hosts_count": 1}, "hosts = 1 is below 2"),
        ({"hosts_count": 2, "replicas_count": 3}, "--replicas = 3 with --hosts = 2"),
        ({"links_count": 0}, "links = 0"),
        ({"requests_per_s": Fraction(10**12), "bytes_per_hit": 1 << 60}, "reads = "),
    ],
)
def test_network_refuses(change: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(NETWORK, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [CAPACITY, OBJECTS, NETWORK], ids=lambda plan: type(plan).__name__)
def test_json_form_is_json_and_keeps_exact_values(plan: ledger.Ledger) -> None:
    data = json.loads(json.dumps(ledger.as_dict(plan)))
    assert data["conclusion"].endswith(".")
    assert len(data["assumptions"]) >= 3
    assert [step["text"] for step in data["steps"]] == [step.text for step in plan.steps]
    for shown, step in zip(data["steps"], plan.steps, strict=True):
        assert Fraction(shown.get("exact", shown["value"])) == step.value


sizes = st.integers(1, 10**6)


@settings(max_examples=50)
@given(
    sizes, sizes, sizes, st.integers(1, 8), st.integers(8, 10**4), sizes, st.fractions(Fraction(1, 100), 1)
)
def test_capacity_bounds_are_tight(
    prefixes: int, tokens: int, per_token: int, copies: int, hosts: int, dram: int, usable: Fraction
) -> None:
    plan = CapacityPlan(
        prefixes_count=prefixes, prefix_tokens=tokens, footprint=Footprint.by_hand(per_token), chunk_tokens=1,
        replicas_count=copies, hosts_count=hosts, dram_per_host_bytes=dram, usable_share=usable, spare_hosts=0,
    )  # fmt: skip
    assert plan.fits == (hosts >= plan.hosts_min)
    assert plan.hosts_min * plan.usable_per_host_bytes >= plan.demand_bytes
    fewer = plan.hosts_min - 1
    assert fewer < copies or fewer * plan.usable_per_host_bytes < plan.demand_bytes
    assert replace(plan, hosts_count=hosts + 1).headroom_bytes > plan.headroom_bytes
    assert replace(plan, prefixes_count=prefixes + 1).headroom_bytes < plan.headroom_bytes


@given(st.integers(1, 10**4), st.integers(1, 10**5), st.integers(1, 10**5), st.integers(0, 10**5), st.data())
def test_objects_never_hold_more_than_there_is(
    prefixes: int, tokens: int, chunk: int, shared: int, data: st.DataObject
) -> None:
    chunk, shared = min(chunk, tokens), min(shared, tokens)
    plan = ObjectsPlan(
        prefixes_count=prefixes, prefix_tokens=tokens, footprint=Footprint.by_hand(16, 8), chunk_tokens=chunk,
        shared_tokens=shared,
    )  # fmt: skip
    assert plan.object_bytes is not None
    assert plan.objects_count * plan.object_bytes <= prefixes * tokens * 16
    larger = data.draw(st.integers(1, tokens // chunk)) * chunk
    assert replace(plan, chunk_tokens=larger, shared_tokens=0).objects_count <= replace(
        plan, shared_tokens=0
    ).objects_count  # fmt: skip


rates = st.fractions(0, 10**4, max_denominator=100)


@settings(max_examples=40)
@given(rates, rates, st.fractions(0, 1, max_denominator=100), st.integers(1, 10**10), st.integers(2, 8))
def test_more_bandwidth_never_needs_more_links(
    requests: Fraction, stores: Fraction, hit: Fraction, link: int, hosts: int
) -> None:
    plan = replace(
        NETWORK, requests_per_s=requests, stores_per_s=stores, hit_share=hit, link_bytes_per_s=Fraction(link)
    )
    wider = replace(plan, link_bytes_per_s=Fraction(link + 1))
    assert wider.links_per_node_min <= plan.links_per_node_min
    assert plan.links_per_node_min * plan.link_effective_bytes_per_s >= plan.matrix.busiest_bytes_per_s
    spread = replace(plan, hosts_count=hosts)
    assert spread.matrix.busiest_bytes_per_s <= plan.read_bytes_per_s + plan.write_bytes_per_s
    assert all(spread.matrix.bytes_per_s[n][n] == 0 for n in range(hosts))
    assert sum(spread.matrix.egress_bytes_per_s) == plan.read_bytes_per_s + plan.write_bytes_per_s
