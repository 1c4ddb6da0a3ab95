"""Chat with a model on Transformers, its cache kept by kvd.

    kvd serve &
    python examples/transformers_chat.py HuggingFaceTB/SmolLM2-135M-Instruct
    python examples/transformers_chat.py build/models/smollm2-135m --say "Hello" --say "And what is a prefix?"

Every turn is found by what was said before it: end the program, start it again (or another beside it), say the same,
and the prompt is not computed a second time. After each answer it prints how much was reused. Without a daemon it chats
just the same, only slower.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvd.engines.transformers import Conversation


def main() -> int:
    """Read lines from the terminal, or take them from --say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder with a checkpoint, or a name on the hub")
    parser.add_argument("--say", action="append", help="say this instead of reading from the terminal")
    parser.add_argument("--socket", help="of the daemon; default: KVD_SOCKET, else /run/kvd/kvd.sock")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--salt", default="", help="a secret that keeps this conversation apart")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    talk = Conversation(options.socket, model, tokenizer, salt=options.salt)
    for text in options.say or map(str.strip, sys.stdin):
        begin, reused = time.perf_counter(), talk.reused_tokens
        print("you:", text)
        print("it: ", talk.say(text, max_new_tokens=options.tokens, do_sample=False))
        took_s = time.perf_counter() - begin
        print(
            f"     ({took_s:.2f} s, {talk.reused_tokens - reused} of {talk.prompt_tokens} prompt tokens from kvd)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
