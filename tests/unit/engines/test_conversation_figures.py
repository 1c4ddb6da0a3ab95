"""The figures of the conversations that benchmarks/engines_vllm_turns.py measures, computed from times made up here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import engines_vllm_turns

    return engines_vllm_turns


def result(*requests: tuple[float, list[float]]) -> dict[str, Any]:
    return {
        "requests": [{"sent_s": sent_s, "token_s": times} for sent_s, times in requests],
        "kvd": {"loads": 1, "hit_tokens": 30, "loaded_bytes": 300}, "prompt_tokens": 120, "computed_prompt_tokens": 90,
        "bytes_per_token": 10, "took_s": 10.0,
    }  # fmt: skip


def test_an_answer_of_one_token_has_no_time_per_token(turns: Any) -> None:
    """Fails if it counts as 0: the median of such answers and of one at 0.5 s a token would be a time nobody had."""
    found = turns.summary(result((0.0, [1.0]), (0.0, [1.0]), (0.0, [1.0, 1.5, 2.0])), 2.0, 0.1)
    assert found["tpot_p50_s"] == 0.5
    assert found["good_share"] == pytest.approx(2 / 3), "one token is good by its first token alone"
    alone = turns.summary(result((0.0, [1.0])), 2.0, 0.1)
    assert (alone["tpot_p50_s"], alone["itl_p50_s"]) == (None, None)
    assert "TPOT p50, s                      -" in turns.table({"alone": alone})


def test_all_requests_are_in_the_denominator(turns: Any) -> None:
    """Fails if only requests within the limits count: late ones took their time too."""
    found = turns.summary(result((0.0, [1.0, 1.1]), (0.0, [3.0, 3.1]), (1.0, [1.5, 4.5])), 2.0, 0.2)
    assert found["good_share"] == pytest.approx(1 / 3)
    assert (found["goodput_per_s"], found["host_s_per_good"]) == (0.1, 10.0)
    assert found["hit_rate_requests"] == pytest.approx(1 / 3)
    assert (found["hit_rate_tokens"], found["hit_rate_bytes"]) == (0.25, 0.25)
    assert found["skipped_tokens"] == 30


def test_without_a_good_request_there_is_no_time_of_one(turns: Any) -> None:
    found = turns.summary(result((0.0, [9.0, 9.1])), 2.0, 0.2)
    assert (found["goodput_per_s"], found["host_s_per_good"]) == (0.0, None)
