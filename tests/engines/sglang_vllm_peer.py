"""vLLM's half of the comparison with SGLang, in vLLM's environment: `sglang_vllm_peer.py MODEL SOCKET '[[ids], …]'`.

Each prompt is computed and stored, then the engine forgets it and loads it from kvd. Prints `RESULT [{...}, …]`.
"""

from __future__ import annotations

import json
import sys

from vllm_lib import Engine, say


def main() -> None:
    """Every prompt cold and loaded."""
    model, socket, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = Engine(model, socket)
    if not engine.ready():
        raise SystemExit("kvd is not attached")
    cold = [engine.run(prompt, 24) for prompt in prompts]
    engine.counters()  # everything is stored when it returns
    if not engine.reset():
        raise SystemExit("the engine does not forget its cache")
    loaded = [engine.run(prompt, 24) for prompt in prompts]
    counted = engine.counters()
    engine.close()
    say(
        {
            "cold": cold,
            "loaded": loaded,
            "hit_tokens": counted["hit_tokens"],
            "failures": counted["load_failures"],
        }
    )


if __name__ == "__main__":
    main()
