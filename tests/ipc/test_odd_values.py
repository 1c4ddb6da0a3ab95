"""Every public call of the client with values that cannot be right: a typed error, whatever they are, and no harm done.

Fails if one argument of one call is used without being checked: the loop below meets all of them with all values.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvd
from kvd.errors import KvdError, UsageError, ViewsAliveError

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.slow
CHUNK = 16
SIZE = 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
}  # fmt: skip


class Unshowable:
    """A value that cannot even be described."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD: list[Any] = [
    None, True, False, 1.5, -1, 0, 5, 2**64, 2**200, math.nan, math.inf, -math.inf, "", "x", "\ud800", "a\0b", b"",
    b"xy", [], [None], {}, (), object(), Unshowable(), numpy.float64(2.5), numpy.int64(7), numpy.zeros(3), 1j, range(3),
    lambda: 1,
]  # fmt: skip


def store_calls(path: str, store: kvd.Store, chain: kvd.Chain, odd: Any) -> Iterator[Callable[[], Any]]:
    """Calls of the store and those that make one."""
    if odd is not None:  # None is the default
        yield lambda: kvd.connect(odd)
        yield lambda: kvd.Admin(odd)
    for name in ("client", "access", "domain", "deadline_s", "verify_reads", "reattach"):
        yield lambda name=name: kvd.connect(path, **{name: odd})  # type: ignore[misc]
    yield lambda: kvd.connect_async(path, deadline_s=odd)
    yield lambda: kvd.Admin(path, deadline_s=odd)
    yield lambda: store.namespace(odd)
    yield lambda: store.fetch(odd)
    yield lambda: store.fetch(chain[0], odd)
    yield lambda: store.fetch(chain[0], request=odd)
    yield lambda: store.call(odd)
    yield lambda: store.call("health", odd)
    yield lambda: store.call("ls", start=odd)
    yield lambda: store.report_damage(odd, 0)
    yield lambda: store.report_damage(chain[0], odd)


def chain_calls(ns: kvd.Namespace, odd: Any) -> Iterator[Callable[[], Any]]:
    """Calls that make identities."""
    yield lambda: ns.chain(odd)
    yield lambda: ns.chain([1, 2, 3], odd)
    yield lambda: ns.chain([1, 2, 3], CHUNK, algorithm=odd)
    yield lambda: ns.chain(list(range(32)), CHUNK, extras=odd)
    yield lambda: ns.chain_hashes(odd, 32, CHUNK)
    yield lambda: ns.chain_hashes(bytes(64), odd, CHUNK)
    yield lambda: ns.chain_hashes(bytes(64), 32, odd)
    yield lambda: ns.chain_of(odd, CHUNK)
    yield lambda: ns.chain_of(bytes(64), odd)
    yield lambda: ns.chain([1], CHUNK).extend(odd)
    yield lambda: ns.chain([], CHUNK).extend_hashes(odd, 32)


def reading_calls(
    ns: kvd.Namespace, chain: kvd.Chain, geom: Any, leases: Any, odd: Any
) -> Iterator[Callable[[], Any]]:
    """Calls that read, and what leases offer."""
    call: Any
    for call in (ns.match, ns.acquire):
        yield lambda call=call: call(odd)
        yield lambda call=call: call(chain, odd)
        yield lambda call=call: call(chain, geom, prompt_tokens=odd)
        yield lambda call=call: call(chain, request=odd)
    exported, lease = leases.export(), leases[0]
    yield lambda: ns.adopt(odd, chain)
    yield lambda: ns.adopt(exported, odd)
    yield lambda: ns.adopt(exported, chain, odd)
    yield lambda: lease.member_view(odd)
    yield lambda: lease.size(odd)
    yield lambda: lease.verify(odd)
    yield lambda: lease.array(odd, (SIZE,))
    yield lambda: lease.array("u1", odd)
    yield lambda: lease.array("u1", (SIZE,), odd)
    yield lambda: leases.copy_to(odd)
    yield lambda: leases.copy_to([odd])
    yield lambda: leases.copy_to([bytearray(SIZE)], member=odd)
    yield lambda: leases.copy_to([bytearray(SIZE)], threads=odd)
    yield lambda: leases.copy_to_async(odd)


def writing_calls(
    ns: kvd.Namespace, fresh: Callable[[], kvd.Chain], geom: Any, odd: Any
) -> Iterator[Callable[[], Any]]:
    """Calls that write."""
    call: Any
    for call in (ns.reserve, ns.reserve_async):
        yield lambda call=call: call(odd, SIZE)
        yield lambda call=call: call(fresh(), odd)
        yield lambda call=call: call(fresh(), members=odd)
        yield lambda call=call: call(fresh(), members=[odd])
        yield lambda call=call: call(fresh(), SIZE, family_members=odd)
        yield lambda call=call: call(fresh(), geom=odd)
        for name in ("split", "rank", "groups"):
            yield lambda call=call, name=name: call(fresh(), geom=geom, **{name: odd})
            yield lambda call=call, name=name: call(fresh(), SIZE, **{name: odd})
        yield lambda call=call: call(fresh(), geom=geom, groups=[odd])
        yield lambda call=call: call(fresh(), SIZE, skip_pending=odd)
        yield lambda call=call: call(fresh(), SIZE, request=odd)
        yield lambda call=call: call(fresh(), SIZE, deadline_s=odd)
    yield lambda: ns.register(odd, [], geom=geom)
    yield lambda: ns.register(odd, [], geom=odd)
    yield lambda: filled(ns, fresh(), lambda writes: writes.fill(odd))
    yield lambda: filled(ns, fresh(), lambda writes: writes.fill([odd]))
    yield lambda: filled(ns, fresh(), lambda writes: writes[0].fill(odd))
    yield lambda: filled(ns, fresh(), lambda writes: writes.gather(odd, [1]), geom)
    for arguments in ((odd, 5), (0, odd), (0, 5, odd), (0, 5, (0, 0), odd), (0, 5, (0, odd))):
        yield lambda arguments=arguments: kvd.Member(*arguments)  # type: ignore[misc]


def filled(ns: kvd.Namespace, chain: kvd.Chain, fill: Callable[[Any], Any], geom: Any = None) -> None:
    with ns.reserve(chain, geom=geom) if geom is not None else ns.reserve(chain, SIZE) as writes:
        fill(writes)


def refused(call: Callable[[], Any]) -> bool:
    """Whether it is refused as it should be; what it gives otherwise is let go of."""
    try:
        given = call()
        if asyncio.iscoroutine(given):
            given = asyncio.run(given)
    except KvdError as error:
        if "incompatible function arguments" in str(error):
            pytest.fail(f"what a binding says is no help: {error}")
        return True
    for name in ("release", "abort", "close"):
        if type(given).__module__.startswith("kvd.") and hasattr(given, name):
            with contextlib.suppress(ViewsAliveError):
                getattr(given, name)()
    return False


def test_no_value_is_too_odd_for_a_typed_error(daemon: Any) -> None:
    running = daemon()
    geom = kvd.Geometry.from_hf_config(CONFIG, dtype="bfloat16")
    number = 0

    def fresh() -> kvd.Chain:
        nonlocal number
        number += 1
        return ns.chain(list(range(number * 1000, number * 1000 + CHUNK)), CHUNK)

    with kvd.connect(running.socket) as store:
        ns = store.namespace(
            kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", salt="", fixed="*")
        )
        chain = fresh()
        with ns.reserve(chain, SIZE) as writes:
            writes.fill([bytes(SIZE)])
            writes.publish()
        calls_count = refused_count = 0
        for odd in ODD:
            leases = ns.acquire(chain)
            for call in (
                *store_calls(running.socket, store, chain, odd),
                *chain_calls(ns, odd),
                *reading_calls(ns, chain, geom, leases, odd),
                *writing_calls(ns, fresh, geom, odd),
            ):
                calls_count += 1
                refused_count += refused(call)
            with contextlib.suppress(ViewsAliveError):
                leases.release()
        print(f"{calls_count} calls, {refused_count} refused")
        assert refused_count > 0.8 * calls_count, "the values are odd"
        assert running.call("status")["core"]["reservations"] == 0, "what was refused holds nothing"
        assert ns.match(chain) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ns, c: ns.match(None), ["chain = None", "ns.chain(tokens"]),
        (lambda ns, c: ns.chain([1], True), ["chunk_tokens = True (bool)", "integer 1 …"]),
        (lambda ns, c: ns.chain(None), ["tokens = None", "integers"]),
        (lambda ns, c: ns.reserve(c, 1.5), ["nbytes = 1.5 (float)", "integer 1 …"]),
        (lambda ns, c: ns.reserve(c, SIZE, request=5), ["request = 5 (int)", "string"]),
        (lambda ns, c: ns.reserve(c, SIZE, deadline_s=math.nan), ["deadline_s = nan", "0 … 1e+06"]),
        (lambda ns, c: ns.reserve(c, SIZE, deadline_s=math.inf), ["deadline_s = inf", "no limit"]),
        (lambda ns, c: ns.reserve(c, SIZE, deadline_s=-1), ["deadline_s = -1", "0 … 1e+06"]),
        (lambda ns, c: ns.reserve(c, SIZE, skip_pending="no"), ["skip_pending = 'no'", "True or False"]),
        (lambda ns, c: ns.reserve(c, SIZE, split=True), ["split = True", "integer"]),
        (lambda ns, c: ns.reserve(c, SIZE, family_members=0), ["family_members = 0", "integer 1 … 128"]),
        (lambda ns, c: ns.reserve(c, SIZE, family_members=129), ["family_members = 129", "integer 1 … 128"]),
        (lambda ns, c: ns.reserve(c, SIZE, family_members=2.0), ["family_members = 2.0", "integer 1 … 128"]),
    ],
)
def test_a_refusal_names_the_argument_its_value_and_what_is_allowed(
    daemon: Any, call: Any, said: list[str]
) -> None:
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns = store.namespace(
            kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", salt="", fixed="*")
        )
        with pytest.raises(UsageError) as caught:
            call(ns, ns.chain(list(range(CHUNK)), CHUNK))
        for part in said:
            assert part in caught.value.message
        assert caught.value.fields["argument"] in said[0]


def test_numbers_of_other_libraries_are_numbers(daemon: Any) -> None:
    running = daemon()
    with kvd.connect(running.socket, deadline_s=numpy.float32(5.0)) as store:
        ns = store.namespace(
            kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", salt="", fixed="*")
        )
        chain = ns.chain(numpy.arange(CHUNK), numpy.int32(CHUNK))
        with ns.reserve(chain, numpy.int64(SIZE), deadline_s=numpy.float64(2)) as writes:
            writes.fill([bytes(SIZE)])
            assert writes.publish() == [kvd.Published.PUBLISHED]
        assert type(chain.chunk_tokens) is int
