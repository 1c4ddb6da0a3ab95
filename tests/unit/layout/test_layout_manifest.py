"""The manifest: nothing is left out unnoticed, nothing that does not belong is let in, and every field counts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.layout import encoding
from kvd.layout.encoding import FIXED
from kvd.layout.manifest import OBJECT_FORMAT_VERSION, Manifest

FULL: dict[str, Any] = {
    "model": "m", "revision": "r1", "dtype": "bfloat16", "architecture": "LlamaForCausalLM",
    "tokenizer": "t@1", "chat_template": "none", "adapter": "none", "position": {"rope_theta": 10000.0},
    "attention": {"num_key_value_heads": 8}, "multimodal": "none", "quantisation": "none",
    "sharing_group": "", "tenant": "acme", "salt": "pepper",
}  # fmt: skip
CIRCLE: dict[str, Any] = {}
CIRCLE["itself"] = CIRCLE


def test_equal_fields_make_one_namespace_whatever_their_order() -> None:
    backwards = dict(reversed(list(FULL.items())))
    assert Manifest(**FULL) == Manifest(**backwards)
    assert hash(Manifest(**FULL)) == hash(Manifest(**backwards))
    assert Manifest(**FULL).short == Manifest(**FULL).root.hex()[:12]
    assert Manifest(**FULL).format_version == OBJECT_FORMAT_VERSION


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "n"), ("revision", "r2"), ("dtype", "float16"), ("architecture", "Other"),
        ("tokenizer", "t@2"), ("chat_template", "c@1"), ("adapter", "lora@1"),
        ("position", {"rope_theta": 10001}), ("attention", {"num_key_value_heads": 4}),
        ("multimodal", "clip@1"), ("quantisation", "scales@1"), ("sharing_group", "g"), ("tenant", "other"),
        ("salt", "salt"), ("format_version", OBJECT_FORMAT_VERSION + 1), ("extra", {"a": 1}),
    ],
)  # fmt: skip
def test_every_field_is_part_of_the_identity(field: str, other: object) -> None:
    """Rows A8, A9 and E2: drop a field from the encoding and the case of that field fails."""
    changed = Manifest(**{**FULL, field: other})
    assert changed.root != Manifest(**FULL).root
    assert list(Manifest(**FULL).differences(changed)) == [field]


def test_fixed_is_a_value_of_its_own() -> None:
    for field in FULL:
        if field in ("model", "revision", "dtype"):
            continue
        fixed = Manifest(**{**FULL, field: FIXED})
        others = {name: value for name, value in FULL.items() if name != field}
        assert fixed == Manifest(**others, fixed=(field,)) == Manifest(**others, fixed=field)
        assert fixed.root != Manifest(**FULL).root
        assert (
            fixed.root
            != Manifest(**{**FULL, field: {} if field in ("position", "attention") else "FIXED"}).root
        )


def test_a_missing_field_is_refused_and_all_are_named() -> None:
    with pytest.raises(UsageError, match=r"without architecture, tokenizer.*fixed=\(") as caught:
        Manifest(model="m", revision="r", dtype="bfloat16")
    missing = str(caught.value.fields["missing"]).split(",")
    assert missing == [name for name in FULL if name not in ("model", "revision", "dtype")]
    assert "salt" in str(caught.value)
    assert caught.value.code == "KVD-USAGE-MANIFEST-MISSING"


def test_a_star_covers_the_rest_but_never_who_shares() -> None:
    """Row E2: let "*" cover tenant or salt and this fails."""
    for dropped in ("tenant", "salt"):
        given_fields = {"model": "m", "revision": "r", "dtype": "bfloat16", "tenant": "t", "salt": "s"}
        del given_fields[dropped]
        with pytest.raises(UsageError, match=f"without {dropped}:"):
            Manifest(**given_fields, fixed="*")
    manifest = Manifest(model="m", revision="r", dtype="bfloat16", tenant="t", salt="s", fixed="*")
    assert manifest.tokenizer is FIXED
    assert manifest.adapter is FIXED
    assert Manifest(model="m", revision="r", dtype="bfloat16", fixed=("*", "tenant", "salt")).salt is FIXED
    for wrong in (None, 5, [[]], [None]):
        with pytest.raises(UsageError, match=r"manifest field fixed is .*; allowed: a list of field names"):
            Manifest(model="m", revision="r", dtype="bfloat16", tenant="", salt="", fixed=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"temperature": 0.7}, "SAMPLING", "sampling setting"),
        ({"extra": {"top_p": 1}}, "SAMPLING", "extra.top_p is a sampling setting"),
        ({"tensor_parallel_size": 4}, "SPLIT", "recorded with each family"),
        ({"tp": 4}, "SPLIT", "the split over ranks"),
        ({"attention": {"pp": 2}}, "SPLIT", "attention.pp"),
        ({"block_size": 16}, "PAGED", "registration"),
        ({"colour": "red"}, "FIELD", "no field 'colour'"),
        ({"fixed": "colour"}, "FIELD", "unknown"),
        ({"fixed": "model"}, "FIELD", "cannot be fixed"),
        ({"fixed": "tokenizer"}, "FIELD", "both given and declared fixed"),
        ({"revision": "main"}, "FIELD", "moves"),
        ({"revision": ""}, "FIELD", "empty"),
        ({"adapter": ""}, "FIELD", "empty"),
        ({"model": " m"}, "FIELD", "blanks"),
        ({"model": 7}, "FIELD", "is a int"),
        ({"adapter": None}, "FIELD", "is a NoneType"),
        ({"position": "rope"}, "FIELD", "a mapping"),
        ({"position": {1: 2}}, "FIELD", "not a string"),
        ({"format_version": 0}, "FIELD", "format_version"),
        ({"format_version": True}, "FIELD", "format_version"),
        ({"dtype": "bf16"}, "DTYPE", "write 'bfloat16'"),
        ({"dtype": "torch.float16"}, "DTYPE", "write 'float16'"),
        ({"position": {"rope_theta": float("nan")}}, "ENCODING", "manifest.position.rope_theta is NaN"),
        ({"extra": {"a": {"b": object()}}}, "ENCODING", "manifest.extra.a.b is a object"),
        ({"extra": {"a": {1, 2}}}, "ENCODING", "is a set"),
        ({"extra": {"a": {1: 2, "b": 3}}}, "ENCODING", "has the key 1, which is not a string"),
        ({"extra": CIRCLE}, "ENCODING", "nested deeper than"),
        ({"extra": {"a": "x" * 70_000}}, "ENCODING", "more than 65536"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(changes: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Manifest(**{**FULL, **changes})
    assert code in caught.value.code


def test_whole_floats_and_integers_are_one_namespace() -> None:
    assert Manifest(**{**FULL, "position": {"rope_theta": 10000}}) == Manifest(**FULL)


def test_a_manifest_does_not_change_after_it_was_made() -> None:
    position: dict[str, Any] = {"rope_theta": 1, "nested": {"a": [1]}}
    manifest = Manifest(**{**FULL, "position": position})
    root = manifest.root
    position["nested"]["a"].append(2)
    position["rope_theta"] = 2
    assert Manifest(**manifest.fields()).root == root
    with pytest.raises(AttributeError):
        manifest.model = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        manifest.position["rope_theta"] = 3  # type: ignore[index]


def test_round_trips_and_replace() -> None:
    manifest = Manifest(**FULL)
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert Manifest.decode(manifest.encode()) == manifest
    assert Manifest(**manifest.fields()) == manifest
    assert manifest.replace(adapter="x@1").adapter == "x@1"
    assert manifest.replace(adapter="x@1") != manifest
    assert manifest.replace() == manifest


def test_the_salt_is_not_shown() -> None:
    manifest = Manifest(**FULL)
    assert "pepper" not in repr(manifest)
    assert "pepper" not in str(manifest.differences(manifest.replace(salt="other")))


def test_bytes_that_are_not_canonical_are_refused() -> None:
    encoded = Manifest(**FULL).encode()
    for bad in (
        b"",
        encoded[:-1],
        encoded + b"\0",
        b"KVDM\x02" + encoded[5:],
        encoded.replace(b"acme", b"ac\xffe"),
    ):
        with pytest.raises(UsageError):
            Manifest.decode(bad)
    swapped = encoding.encode({"b": 1, "a": 2})
    assert swapped == encoding.encode({"a": 2, "b": 1})
    with pytest.raises(UsageError, match="canonical"):
        encoding.decode(b"m\x02\0\0\0" + b"s\x01\0\0\0bn" + b"s\x01\0\0\0an")
    with pytest.raises(UsageError, match="canonical"):
        encoding.decode(b"i\x02\0\0\0" + b"01")
    with pytest.raises(UsageError, match="cut short"):
        encoding.decode(b"l\xff\xff\xff\xffn")
    with pytest.raises(UsageError, match="deeper"):
        encoding.decode(b"l\x01\0\0\0" * 40 + b"n")
    with pytest.raises(UsageError, match="deeper"):
        encoding.encode([[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]])
    with pytest.raises(UsageError, match="malformed"):
        encoding.decode(b"i\x01\0\0\0x")
    with pytest.raises(UsageError, match="unknown tag"):
        encoding.decode(b"q")
    with pytest.raises(UsageError, match="not valid Unicode"):
        encoding.encode("\ud800")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_hostile_bytes_end_in_one_typed_error_or_another_manifest(changes: list[tuple[int, int]]) -> None:
    """What a client sends the daemon: any other exception would be a bug."""
    encoded = bytearray(Manifest(**FULL).encode())
    for position, byte in changes:
        encoded[position % len(encoded)] = byte
    try:
        manifest = Manifest.decode(bytes(encoded))
    except UsageError:
        return
    assert manifest.encode() == bytes(encoded)


def test_absurd_integers_are_refused() -> None:
    with pytest.raises(UsageError, match="integer of 20000 bits"):
        encoding.encode(1 << 19_999)
    with pytest.raises(UsageError):
        encoding.decode(b"i" + (5000).to_bytes(4, "little") + b"9" * 5000)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_every_value_decodes_to_itself(value: object) -> None:
    encoded = encoding.encode(value)
    assert encoding.decode(encoded) == value
    assert encoding.encode(encoding.decode(encoded)) == encoded


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_or_canonical(data: bytes) -> None:
    try:
        value = encoding.decode(data)
    except UsageError:
        return
    assert encoding.encode(value) == data
