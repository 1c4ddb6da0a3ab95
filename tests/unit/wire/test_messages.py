"""Control messages: every one round trips, and bad ones are refused naming message and key."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import CapacityError, CompatibilityError, KvdError, ProtocolError
from kvd.wire import frames
from kvd.wire import messages as m

ASKS = [
    m.Hello((1, 1), "0.1.0", 1, "engine-0", "engine"),
    m.Attach("default", "read"),
    m.Detach(),
    m.Namespace(b"KVDM\x01n", "llama"),
    m.Call("status", {}),
]
ANSWERS = [
    m.Welcome(1, "0.1.0", 1, b"\1" * 8, 77),
    m.Attached(3, "default", [1 << 30, 1 << 21], 5, False),
    m.Segments(2, True),
    m.Detached(0, 2),
    m.Namespaced(4),
    m.Result({"a": [1, None]}),
    m.Error.of(CapacityError("full", code="pool", leased_bytes=3)),
]
OPTIONAL = {
    ("hello", "role"), ("attach", "domain"), ("attach", "access"), ("namespace", "label"), ("detach", "gives_back"),
}  # fmt: skip


@pytest.mark.parametrize("body", ASKS, ids=lambda body: body.type)
def test_asks_round_trip(body):
    (message,) = frames.Decoder().feed(frames.encode(body.to_map(9)))
    assert m.parse_ask({**message, "unknown": 1}) == (9, body)
    with pytest.raises(ProtocolError, match="does not know"):
        m.parse_answer(message)


@pytest.mark.parametrize("body", ANSWERS, ids=lambda body: body.type)
def test_answers_round_trip(body):
    (message,) = frames.Decoder().feed(frames.encode(body.to_map(9)))
    assert m.parse_answer(message) == (9, body)
    with pytest.raises(ProtocolError, match="does not know"):
        m.parse_ask(message)


@pytest.mark.parametrize("body", ASKS + ANSWERS, ids=lambda body: body.type)
def test_every_key_is_checked(body):
    """A message with one key missing or mistyped is refused by the key's name (or has a default)."""
    parse = m.parse_ask if body in ASKS else m.parse_answer
    message = body.to_map(1)
    for key in set(message) - {"t"}:
        if key != "result":
            with pytest.raises(ProtocolError) as caught:
                parse({**message, key: 1.5})
            assert repr(key) in str(caught.value)
        without = {name: value for name, value in message.items() if name != key}
        if (body.type, key) in OPTIONAL:
            parse(without)
            continue
        with pytest.raises(ProtocolError) as caught:
            parse(without)
        assert repr(key) in str(caught.value)


names = st.sampled_from(["t", "id", "protocol", "method", "params", "split", "manifest", "role", "error"])
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from([body.type for body in ASKS + ANSWERS]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


@pytest.mark.slow
@given(st.dictionaries(names, anything))
def test_arbitrary_maps_raise_nothing_but_protocol_errors(message):
    for parse in (m.parse_ask, m.parse_answer):
        with contextlib.suppress(ProtocolError):
            parse(message)


def test_errors_cross_with_type_code_and_fields():
    (message,) = frames.Decoder().feed(
        frames.encode(m.Error.of(CapacityError("full", code="pool", leased_bytes=3)).to_map(1))
    )
    _, answer = m.parse_answer(message)
    error = answer.exception()
    assert isinstance(error, CapacityError)
    assert (error.code, error.message, error.fields) == ("KVD-CAPACITY-POOL", "full", {"leased_bytes": 3})


def test_an_unreadable_error_is_still_an_error():
    assert isinstance(m.Error({"code": "KVD", "retry": "sometimes"}).exception(), KvdError)


def test_versions_are_agreed_or_refused_naming_both_sides():
    def hello(**changes):
        return m.Hello(
            **{"protocol": (1, 1), "version": "9.9", "layout": 1, "client": "x", "role": "engine", **changes}
        )

    assert m.agree(hello(), "0.1.0") == 1
    assert m.agree(hello(protocol=(0, 7)), "0.1.0") == 1
    assert m.agree(hello(role="admin", layout=5), "0.1.0") == 1
    for changes, code in (
        ({"protocol": (2, 3)}, "KVD-COMPAT-PROTOCOL"),
        ({"layout": 2}, "KVD-COMPAT-LAYOUT"),
    ):
        with pytest.raises(CompatibilityError, match=r"9\.9.*0\.1\.0") as caught:
            m.agree(hello(**changes), "0.1.0")
        assert caught.value.code == code


def test_names_cannot_carry_control_characters():
    message = m.Hello((1, 1), "1", 1, "a\x1b[31mb\nc").to_map(1)
    assert m.parse_ask(message)[1].client == "a?[31mb?c"
