"""The real SGLang on kvd, in processes of its own (`make test-engines-sglang`).

Rows A8, A9, B1, C2, C8, E2 of the field's list. Skipped, saying so, where `build/venv-sglang` is missing. Each scenario
compares tokens with those of an engine without kvd, and asserts from the counters that kvd's bytes were really loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import kvd

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / "build" / "venv-sglang" / "bin" / "python"
VLLM_PYTHON = ROOT / "build" / "venv-vllm" / "bin" / "python"
SMOLLM = ROOT / "build" / "models" / "smollm2-135m"
STUBS = ROOT.parent / "shared" / "engines" / "sglstub"
PROMPT = [(7 * i + 3) % 500 + 3 for i in range(1000)]
PAGES = 15  # of 64 tokens, of a prompt of 1000
ANSWER_S = 240.0

pytestmark = [
    pytest.mark.skipif(
        not (os.environ.get("KVD_TEST_ENGINES") and PYTHON.exists() and STUBS.exists()),
        reason="the real SGLang runs with make test-engines-sglang, and needs ../shared/engines/sglstub: its kernels",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def environment(**more: str) -> dict[str, str]:
    """Of SGLang's processes: kernels' stand-ins, what the tests add, and where this process finds its modules."""
    path = os.pathsep.join(filter(None, (str(STUBS), str(HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **more}


class Engine:
    """One SGLang, answering one prompt after the other (`sglang_cpu.py`)."""

    def __init__(self, model: Path, folder: Path, **job: Any) -> None:
        self._counters, self._log = folder / "counters.json", folder / "engine.log"
        self._counters.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), str(HERE / "sglang_cpu.py"), str(model), json.dumps(job)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment(KVD_TEST_COUNTERS=str(self._counters)),
            )  # fmt: skip
        self._read = b""
        self._answer()

    def ask(self, prompt: list[int], *, flush: bool = True, tokens: int = 8) -> tuple[list[int], int]:
        """The tokens generated, and how many of the prompt were in a cache. `flush`: not in the engine's own."""
        assert self._process.stdin is not None
        order = {"prompt": prompt, "flush": flush, "tokens": tokens}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        told = self._answer()
        return told["tokens"], told["cached"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        end = time.monotonic() + ANSWER_S
        while True:
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                if line.startswith(b"RESULT "):
                    return json.loads(line.removeprefix(b"RESULT "))
                continue
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            assert piece, f"the engine {'ended' if ready else 'hangs'}:\n{self.log()[-6000:]}"
            self._read += piece

    def log(self) -> str:
        """What the engine's processes wrote to the standard error."""
        return self._log.read_text(errors="replace")

    def counters(self) -> dict[str, int]:
        """kvd's counters; none before its first hook was called."""
        try:
            counted: dict[str, int] = json.loads(self._counters.read_text())
        except FileNotFoundError:
            return {}
        return counted

    def reaches(self, reached: Callable[[dict[str, int]], bool], timeout_s: float) -> bool:
        """SGLang stores behind its answers: whether the counters come to say so."""
        end = time.monotonic() + timeout_s
        while not reached(self.counters()):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def until(self, what: str, reached: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """The counters, once they say so."""
        assert self.reaches(reached, 60), f"no {what}: {self.counters()}\n{self.log()[-3000:]}"
        return self.counters()

    def saved(self, pages: int) -> dict[str, int]:
        """Until so many pages were stored."""
        return self.until(f"{pages} saved pages", lambda counted: counted.get("saved_pages", 0) >= pages)

    def close(self) -> None:
        """End it, and all its processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """engine(model, socket=..., layout=..., plain=..., extra=...): closed at the test's end."""
    with contextlib.ExitStack() as stack:

        def start(model: Path, **job: Any) -> Engine:
            one = Engine(model, tmp_path, **job)
            stack.callback(one.close)
            return one

        yield start


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """A tiny random Llama on disk."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=512, max_position_embeddings=4096,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: Any) -> Path:
    """The same with sliding and full layers in turn, of which SGLang makes two pools: windows of two pages."""
    torch, mellum = pytest.importorskip("torch"), pytest.importorskip("transformers.models.mellum")
    torch.manual_seed(11)
    config = mellum.MellumConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=512, max_position_embeddings=4096, sliding_window=129, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, initializer_range=0.3, mlp_layer_types=["dense"] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("hybrid")
    mellum.MellumForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(number: int) -> list[int]:
    """A prompt that shares no page with another."""
    return [number + 3, *PROMPT[1:]]


def answers(model: Path, folder: Path, prompts: list[list[int]], **job: Any) -> list[list[int]]:
    """What an engine without kvd generates."""
    with contextlib.closing(Engine(model, folder, plain=True, socket="", **job)) as plain:
        return [plain.ask(one)[0] for one in prompts]


def families(running: Any, namespace: int | None = None) -> list[bytes]:
    """What is stored, of all namespaces or of one (numbers in the order in which the daemon learnt of them)."""
    rows = running.call("ls", limit=1000)["families"]
    return [bytes.fromhex(row["key"]) for row in rows if namespace in (None, row["namespace"])]


def spoil(running: Any, keys: list[bytes]) -> None:
    """Overwrite objects, checksums left alone: this process maps the pool writable."""
    with kvd.connect(running.socket) as store:
        for key in keys:
            lease = store.fetch(key)
            assert lease is not None
            array = numpy.frombuffer(lease.view, dtype=numpy.uint8)
            ctypes.memset(array.ctypes.data, 0, array.nbytes)
            del array


def test_pages_of_sglangs_own_host_pools_meet_in_every_layout(daemon: Any, tmp_path: Path) -> None:
    """Keys and values, latents, states, in SGLang's own classes. Fails wherever `sglang_real_pools.py` says."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    command = [str(PYTHON), str(HERE / "sglang_real_pools.py"), daemon().socket, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    compared = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    print("seed", compared.pop("seed"))
    assert compared == {"keys and values": 16, "different widths": 4, "latents": 9, "packed latents": 9}


def test_a_second_engine_hits_what_the_first_one_stored(
    daemon: Any, engine: Any, model: Path, tmp_path: Path
) -> None:
    """Fails if spoiled bytes give the same tokens: then nothing of kvd's was used."""
    running = daemon(pool={"size": "128MiB"})
    (plain,) = answers(model, tmp_path, [PROMPT])
    first = engine(model, socket=running.socket, layout="page_first_direct")
    assert first.ask(PROMPT) == (plain, 0)
    first.saved(PAGES)
    first.close()
    second = engine(model, socket=running.socket, layout="layer_first")
    assert second.ask(PROMPT) == (plain, PAGES * 64)
    assert second.counters()["loaded_pages"] == PAGES
    spoil(running, families(running))
    tokens, cached = second.ask(PROMPT)
    assert cached == PAGES * 64
    assert tokens != plain


def test_pages_of_a_hybrid_model_reach_another_engine_through_v2(
    daemon: Any, engine: Any, hybrid: Path
) -> None:
    """Two pools: all pages of the full layers, the last two of the sliding ones. Fails if a pool's pages are not
    stored, or a prefix is used whose windows are damaged.

    Tokens are not compared: without CUDA SGLang does not bring loaded pages of a hybrid model to its layers, and
    generates with its own file storage the same other tokens as here. What the pages hold is compared byte for byte in
    `sglang_real_pools.py`.
    """
    running = daemon(pool={"size": "128MiB"})
    first = engine(hybrid, socket=running.socket, layout="page_first_direct")
    assert first.ask(PROMPT)[1] == 0
    first.saved(PAGES + 2)
    first.close()
    second = engine(hybrid, socket=running.socket, layout="layer_first", extra={"verify": True})
    assert second.ask(PROMPT)[1] == PAGES * 64
    counted = second.counters()
    page_bytes = 64 * 2 * 2 * 2 * 16 * 4  # tokens, layers of a pool, K and V, heads, width, float32
    assert (counted["loaded_pages"], counted["loaded_bytes"]) == (PAGES + 2, (PAGES + 2) * page_bytes)
    assert (counted["pages_short"], counted["failures"]) == (0, 0)
    windows = min((families(running, number) for number in (0, 1, 2)), key=lambda keys: len(keys) or PAGES)
    assert len(windows) == 2
    spoil(running, windows)
    assert second.ask(PROMPT)[1] == 0, "no prefix without its windows"
    assert second.counters()["failures"] > 0


def test_the_engine_goes_on_whatever_becomes_of_the_daemon(
    daemon: Any, engine: Any, model: Path, tmp_path: Path
) -> None:
    """Rows B1, C2, C8: away at the start, killed, restarted, stopped, full, damaged. One engine lives through it all.

    Fails if a hook raises (the engine ends), if one waits (ANSWER_S), if spoiled bytes are used, or nothing is counted.
    """
    prompts = [prompt(number) for number in range(8)]
    plain = answers(model, tmp_path, prompts)
    directory = tmp_path / "d"
    directory.mkdir()
    one = engine(
        model, socket=str(directory / "kvd.sock"), layout="page_first_direct", extra={"verify": True, "deadline_s": 0.5}
    )  # fmt: skip
    assert one.ask(prompts[0]) == (plain[0], 0), "no daemon yet"
    assert one.until("away", lambda counted: counted.get("away", 0) > 0)["saved_pages"] == 0

    pool = {"size": "4MiB"}
    running = daemon(directory=directory, pool=pool)
    store_until(one, prompts[0], plain[0], PAGES)
    assert one.ask(prompts[0]) == (plain[0], PAGES * 64), "attached by itself, stored, loaded"

    running.process.send_signal(signal.SIGSTOP)
    try:
        assert one.ask(prompts[0]) == (plain[0], PAGES * 64), "reading needs no daemon"
        before = one.counters()
        assert one.ask(prompts[1]) == (plain[1], 0)
        given_up = one.until(
            "a save given up", lambda counted: counted["failures"] + counted["saves_resting"] > 0
        )
        assert given_up["saved_pages"] == before["saved_pages"]
    finally:
        running.process.send_signal(signal.SIGCONT)

    running.kill()
    until_away(one, prompts[2], plain[2])
    running = daemon(directory=directory, pool=pool)
    store_until(one, prompts[2], plain[2], one.counters()["saved_pages"] + PAGES)
    assert one.ask(prompts[2]) == (plain[2], PAGES * 64), "attached again"

    spoil(running, families(running))
    before = one.counters()
    assert one.ask(prompts[2]) == (plain[2], 0), "damaged pages are computed, not used"
    assert one.counters()["failures"] > before["failures"]

    held_full(running, one, prompts[3:], plain[3:])
    assert "Traceback" not in one.log(), f"a hook raised:\n{one.log()[-6000:]}"


def store_until(one: Engine, ids: list[int], expected: list[int], pages: int) -> None:
    """The daemon is there, the engine finds out by itself: the same prompt, until it was stored."""
    for _ in range(20):
        assert one.ask(ids)[0] == expected
        if one.reaches(lambda counted: counted.get("saved_pages", 0) >= pages, 3):
            return
    pytest.fail(f"not stored: {one.counters()}\n{one.log()[-3000:]}")


def until_away(one: Engine, ids: list[int], expected: list[int]) -> None:
    """The daemon is gone: prompts go on, and the counter says why nothing is found."""
    before = one.counters()["away"]
    end = time.monotonic() + 30
    while one.counters()["away"] == before:
        assert time.monotonic() < end, "the engine did not notice"
        assert one.ask(ids)[0] == expected


def held_full(running: Any, one: Engine, prompts: list[list[int]], plain: list[list[int]]) -> None:
    """Whatever is stored is leased by somebody, until nothing can be stored any more."""
    with kvd.connect(running.socket) as store:
        held = []
        for ids, expected in zip(prompts, plain, strict=True):
            saves = one.counters()["saves"]
            assert one.ask(ids)[0] == expected
            one.until("saves of it", lambda counted, least=saves: counted["saves"] > least)
            held = [lease for key in families(running) if (lease := store.fetch(key)) is not None]
            if one.counters()["saves_full"]:
                break
        assert one.counters()["saves_full"], one.counters()
        assert held


TEXTS = (
    "In a quiet valley there was a library with more rooms than anybody had counted. ",
    "The storage of what was computed once is worth more, the longer it took to compute. ",
)


@pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason="vLLM has an environment of its own: make test-engines-vllm"
)
@pytest.mark.skipif(not SMOLLM.exists(), reason="make demo makes the trained model's checkpoint")
def test_vllm_and_sglang_give_the_same_tokens_from_what_each_loaded(daemon: Any, engine: Any) -> None:
    """A trained model, prompts of text, greedily, both engines on one daemon at once: their pages never meet, for they
    are named by other hashes. Fails if an engine loads what is not its own, or its layout is described wrongly.
    """
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM)
    prompts = [tokenizer(text * 60)["input_ids"][:900] for text in TEXTS]
    running = daemon(pool={"size": "512MiB"})
    command = [
        str(VLLM_PYTHON),
        str(HERE / "sglang_vllm_peer.py"),
        str(SMOLLM),
        running.socket,
        json.dumps(prompts),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, start_new_session=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    vllm = json.loads(lines[-1].removeprefix("RESULT "))
    assert [one["tokens"] for one in vllm["loaded"]] == [one["tokens"] for one in vllm["cold"]]
    assert (vllm["hit_tokens"], vllm["failures"]) == (2 * 896, 0)

    sglang = engine(SMOLLM, socket=running.socket, layout="page_first_direct")
    cold = [sglang.ask(ids, flush=False, tokens=24) for ids in prompts]
    assert [cached for _, cached in cold] == [0, 0], "vLLM's blocks are not SGLang's pages"
    sglang.saved(2 * (900 // 64))
    loaded = [sglang.ask(ids, tokens=24) for ids in prompts]
    assert [cached for _, cached in loaded] == [896, 896]
    assert sglang.counters()["loaded_pages"] == 2 * 14
    assert [tokens for tokens, _ in cold] == [one["tokens"] for one in vllm["cold"]]
    assert [tokens for tokens, _ in loaded] == [one["tokens"] for one in vllm["loaded"]]
