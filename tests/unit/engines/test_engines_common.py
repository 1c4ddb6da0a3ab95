"""What adapters share: names of weights, manifests, attachment, worth of a load, counters."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.engines.common import manifest_from, weights_revision
from kvd.engines.common_attach import Attachment
from kvd.engines.common_counters import Counters
from kvd.engines.common_worth import FAILURE_REST_NS, FAILURES_MAX, PROBE_EVERY, Worth
from kvd.errors import UsageError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 10000.0,
}  # fmt: skip
SAME = {"model": "m", "revision": "r1", "dtype": "bfloat16"}


def folder(at: Path, weights: bytes) -> Path:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(CONFIG))
    (at / "model.safetensors").write_bytes(weights)
    return at


def test_weights_have_another_name_when_a_sampled_part_changes(tmp_path: Path) -> None:
    """A9. Training changes every tensor; without the samples beyond the head these two would be one."""
    weights = bytes(5 << 20)
    trained = weights[: 3 << 20] + b"\1" * (2 << 20)
    first = weights_revision(folder(tmp_path / "a", weights))
    assert weights_revision(folder(tmp_path / "copied", weights)) == first
    assert weights_revision(folder(tmp_path / "trained", trained)) != first
    assert weights_revision(folder(tmp_path / "longer", weights + b"\0")) != first


def test_the_last_bytes_of_a_file_are_looked_at(tmp_path: Path) -> None:
    weights = bytes((1 << 20) + 10)
    first = weights_revision(folder(tmp_path / "a", weights))
    assert weights_revision(folder(tmp_path / "b", weights[:-1] + b"\1")) != first


def test_a_commit_names_weights(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert weights_revision("org/model", revision=commit) == commit
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert weights_revision(snapshot) == commit


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_name_that_moves_is_refused(revision: str | None) -> None:
    with pytest.raises(UsageError, match="name the revision yourself"):
        weights_revision("org/model", revision=revision)


def test_everything_that_changes_kv_changes_the_manifest() -> None:
    """A8, A9, E2: without any of these fields two of the manifests below would be equal."""
    manifests = [
        manifest_from(CONFIG, **SAME),
        manifest_from(CONFIG, **{**SAME, "revision": "r2"}),
        manifest_from(CONFIG, **{**SAME, "dtype": "float32"}),
        manifest_from(CONFIG, **SAME, salt="s"),
        manifest_from(CONFIG, **SAME, tenant="t"),
        manifest_from(CONFIG, **SAME, adapter="lora@1"),
        manifest_from(CONFIG, **SAME, quantisation="awq"),
        manifest_from(CONFIG, **SAME, extra={"engine": "x"}),
        manifest_from({**CONFIG, "rope_theta": 20000.0}, **SAME),
        manifest_from({**CONFIG, "num_hidden_layers": 3}, **SAME),
    ]
    assert len({manifest.root for manifest in manifests}) == len(manifests)
    assert manifest_from(dict(reversed(CONFIG.items())), **SAME).root == manifests[0].root


def test_values_that_json_cannot_keep_do_not_matter() -> None:
    """A config object of an engine may hold types; only what identifies the model counts."""
    assert manifest_from({**CONFIG, "dtype": complex}, **SAME).root == manifest_from(CONFIG, **SAME).root


def test_a_load_pays_when_it_is_faster_than_computing() -> None:
    """C8. 1 MB at 1 GB/s is 1 ms; 100 tokens at 100 µs are 10 ms."""
    worth = Worth()
    assert worth.pays(1000, 100, 1 << 20, 0)  # nothing is known yet
    worth.loaded(10_000_000, 10_000_000)
    worth.computed(100, 10_000_000)
    assert worth.pays(1000, 100, 1_000_000, 0)
    for _ in range(40):
        worth.loaded(10_000_000, 1_000_000_000)  # 10 MB/s: 1 MB takes 100 ms
    answers = [worth.pays(1000, 100, 1_000_000, 0) for _ in range(2 * PROBE_EVERY)]
    assert answers.count(True) == 2  # one in PROBE_EVERY measures again
    assert worth.refused_count == 2 * PROBE_EVERY


def test_failures_in_a_row_stop_loading_for_a_while() -> None:
    worth = Worth()
    for _ in range(FAILURES_MAX - 1):
        worth.failed(0)
    worth.loaded(1 << 20, 1_000_000)  # one success: not in a row
    worth.failed(0)
    assert worth.pays(10, 5, 1, 1)
    for _ in range(FAILURES_MAX):
        worth.failed(0)
    assert not worth.pays(10, 5, 1, 1)
    assert worth.pays(10, 5, 1, FAILURE_REST_NS)


def test_counters_are_there_from_the_start_and_taken_as_changes() -> None:
    counters = Counters(("a", "b"))
    assert counters.totals() == {"a": 0, "b": 0}
    counters.add("a", 3)
    assert counters.take() == {"a": 3}
    assert counters.take() == {}
    counters.add("a")
    assert (counters.take(), counters.totals()) == ({"a": 1}, {"a": 4, "b": 0})
    with pytest.raises(KeyError):
        counters.add("c")


@pytest.mark.slow
def test_attachment_comes_and_goes_with_the_daemon(daemon: Callable[..., Any]) -> None:
    """C3: attached again in under 5 s after a kill, the same session; nobody who reads `session` waits."""
    running = daemon()
    prepared: list[object] = []
    gone = threading.Event()
    attachment = Attachment(
        lambda store: prepared.append(store) or store, socket=running.socket, deadline_s=2
    )
    try:
        session = attachment.wait(5)
        assert session is not None
        running.kill()
        for _ in range(500):
            if attachment.session is None:
                break
            gone.wait(0.01)
        assert attachment.session is None
        again = daemon(directory=running.directory)
        assert attachment.wait(5) is session
        assert attachment.attached_count == 2
        assert session.status()["health"] is not None or again.pid
        assert len(prepared) == 1
    finally:
        attachment.close()


def test_trouble_means_rest_and_longer_each_time() -> None:
    attachment = Attachment(lambda store: store, socket="/nonexistent/kvd.sock", deadline_s=0.1)
    try:
        assert attachment.session is None
        assert not attachment.resting
        attachment.trouble()
        assert attachment.resting
        first = attachment._rest_s
        attachment.trouble()
        assert attachment._rest_s == 2 * first
        attachment.well()
        assert attachment._rest_s < first
    finally:
        attachment.close()
