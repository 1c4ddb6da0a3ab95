"""What the demo found: the checks that decide its exit code, the table for people, the record for programs.

Pure apart from printing to the console it is given.
"""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MIB = 1 << 20
QUIET_SHARE = 0.8  # below it the times say more about the machine's other work than about kvd


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, in words, and what was seen."""

    name: str
    ok: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that the two processes and the daemon said. Times in seconds, sizes in bytes."""

    writer: dict[str, Any]
    reader: dict[str, Any]
    daemon_bytes_before: int
    daemon_bytes_after: int
    reference_logits: bytes
    found_logits: bytes

    @property
    def ttft_cold_s(self) -> float:
        return float(statistics.median(self.writer["ttft_cold_s"]))

    @property
    def ttft_kvd_s(self) -> float:
        return float(statistics.median(self.reader["ttft_kvd_s"]))

    @property
    def speed_up(self) -> float:
        return self.ttft_cold_s / self.ttft_kvd_s

    @property
    def speed_up_fastest(self) -> float:
        """From the fastest run of each side: what is left when other work on the machine disturbed some runs."""
        return float(min(self.writer["ttft_cold_s"]) / min(self.reader["ttft_kvd_s"]))

    @property
    def processor_share(self) -> float:
        """Share of its threads' time that process A really ran on a processor while it computed cold, 0 to 1.

        Cold runs are long, so they suffer most from other work: a low share makes the speed-up look better than it is.
        """
        return float(
            sum(self.writer["ttft_cold_cpu_s"]) / sum(self.writer["ttft_cold_s"]) / self.writer["threads"]
        )

    @property
    def bytes_reused(self) -> int:
        """Of one run of the prompt."""
        return int(self.reader["chunks_reused"] * self.writer["chunk_bytes"])

    @property
    def daemon_bytes_read(self) -> int:
        """What the daemon counted while process B ran, all of its runs together."""
        return self.daemon_bytes_after - self.daemon_bytes_before

    @property
    def tokens_equal(self) -> bool:
        first = self.writer["tokens_cold"][:1]
        firsts_equal = all([token] == first for token in self.reader["first_tokens_kvd"])
        return bool(firsts_equal and first and self.reader["tokens_kvd"] == self.writer["tokens_cold"])

    @property
    def logits_equal(self) -> bool:
        """Bit for bit, every logit of every token that process B computed after the prefix."""
        return (
            len(self.reference_logits) > 0
            and self.writer["logits_shape"] == self.reader["logits_shape"]
            and self.reference_logits == self.found_logits
        )

    def checks(self) -> list[Check]:
        """All must be ok, or the demo fails."""
        writer, reader = self.writer, self.reader
        tokens, shape = writer["tokens_cold"], " x ".join(f"{n:,}" for n in writer["logits_shape"])
        acquired = reader["acquired_bytes"]
        return [
            Check(
                "both processes had the same prompt and as many threads",
                writer["prompt_sha256"] == reader["prompt_sha256"] and writer["threads"] == reader["threads"],
                f"{reader['prompt_tokens']:,} tokens, {reader['threads']} threads",
            ),
            Check("tokens were reused", reader["tokens_reused"] > 0, f"{reader['tokens_reused']:,} tokens"),
            Check(
                "the bytes came from kvd (counted by the daemon)",
                acquired > 0 and self.daemon_bytes_read == acquired,
                f"process B leased {acquired:,} B, the daemon counted {self.daemon_bytes_read:,} B",
            ),
            Check(
                "each chunk read is the chunk published (sha256)",
                0 < reader["chunks_reused"] == len(reader["chunk_sha256"])
                and reader["chunk_sha256"] == writer["chunk_sha256"][: reader["chunks_reused"]],
                f"{reader['chunks_reused']} chunks of {writer['chunk_bytes']:,} B",
            ),
            Check("tokens equal a run without kvd", self.tokens_equal, f"{len(tokens)} tokens"),
            Check(
                "logits equal a live cache split there, bit for bit", self.logits_equal, f"{shape} float32"
            ),
            Check(
                "control: a zeroed chunk does change the logits",
                reader["control_sha256"] != writer["logits_sha256"] and reader["control_max_difference"] > 0,
                f"by up to {reader['control_max_difference']:.3g}",
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """For build/demo.json: the findings of the table, then the raw answers of both processes."""
        checks = self.checks()
        return {
            "ok": all(check.ok for check in checks),
            "model": "SmolLM2-135M-Instruct",
            "prompt_tokens": self.reader["prompt_tokens"],
            "tokens_reused": self.reader["tokens_reused"],
            "bytes_reused": self.bytes_reused,
            "ttft_cold_s": self.ttft_cold_s,
            "ttft_kvd_s": self.ttft_kvd_s,
            "speed_up": self.speed_up,
            "speed_up_fastest": self.speed_up_fastest,
            "processor_share": self.processor_share,
            "tokens_equal": self.tokens_equal,
            "logits_equal": self.logits_equal,
            "daemon_bytes_read": self.daemon_bytes_read,
            "checks": [asdict(check) for check in checks],
            "machine": {"platform": platform.platform(), "python": platform.python_version()},
            "writer": self.writer,
            "reader": self.reader,
        }


def print_findings(console: Console, found: Findings) -> None:
    """The table of results and the list of checks."""
    reader, writer = found.reader, found.writer
    runs = found.daemon_bytes_read / found.bytes_reused if found.bytes_reused else 0
    table = Table(
        title="One conversation, two processes, one daemon", title_justify="left", show_header=False
    )
    table.add_column(style="cyan")
    table.add_column()
    share = reader["tokens_reused"] / reader["prompt_tokens"]
    table.add_row("prompt", f"{reader['prompt_tokens']:,} tokens")
    table.add_row(
        "reused from kvd",
        f"{reader['tokens_reused']:,} tokens ({share:.0%}), {reader['chunks_reused']} chunks",
    )
    table.add_row("computed anew", f"{writer['tail_tokens']:,} tokens")
    table.add_row("bytes reused", f"{mib(found.bytes_reused)}, read in place")
    table.add_row(
        "bytes read (the daemon's count)", f"{mib(found.daemon_bytes_read)} = {runs:.3g} reads of them"
    )
    table.add_row("time to first token, cold", spread(writer["ttft_cold_s"]))
    table.add_row("time to first token, with kvd", spread(reader["ttft_kvd_s"]))
    finding, loading = (statistics.median(reader[name]) for name in ("match_s", "load_s"))
    table.add_row("  of it hash and lookup", f"{finding * 1e3:.2f} ms")
    table.add_row("  of it bytes into the model", f"{loading * 1e3:.0f} ms")
    table.add_row(
        "speed-up", f"[bold]{found.speed_up:.1f} x[/bold] (fastest runs: {found.speed_up_fastest:.1f} x)"
    )
    if found.processor_share < QUIET_SHARE:
        busy = f"other work left process A {found.processor_share:.0%} of its processors"
        table.add_row("[yellow]do not quote these times[/yellow]", f"[yellow]{busy}[/yellow]")
    table.add_row("tokens equal (without kvd)", yes_no(found.tokens_equal))
    table.add_row("logits equal (live split, bit for bit)", yes_no(found.logits_equal))
    table.add_row("the model goes on with", escape(f"“{reader['answer'].strip()} …”"))
    console.print()
    console.print(table)
    console.print()
    for check in found.checks():
        mark = "[green]ok  [/green]" if check.ok else "[bold red]FAIL[/bold red]"
        console.print(f"{mark}  {check.name}: {check.seen}", soft_wrap=True)


def spread(seconds: list[float]) -> str:
    """Median, and from where to where the runs were."""
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds):.3f} s (median of {len(seconds)}, {low:.3f} to {high:.3f})"


def mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"


def yes_no(value: bool) -> str:
    return "[green]yes[/green]" if value else "[bold red]no[/bold red]"
