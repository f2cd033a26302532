"""Counters of a server, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgekv.engine import EngineGauges, SpeculationStats
from edgekv.serve.errors import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Histogram:
    """Counts of values up to each of some bounds, as Prometheus defines a histogram."""

    def __init__(self, bounds: abc.Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Its samples."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


@dataclass(slots=True)
class Metrics:
    """Counters since the start.

    The engine's thread writes all but `answers` and `disconnects`, which the thread of the connections writes; any
    thread may read.

    Attributes:
        answers: HTTP answers by path and status.
        disconnects: clients that left before the end of their answer.
        prompt_tokens: tokens of the prompts of all answers.
        reused_tokens: those of them that were not computed.
        restored_tokens: those of these that came from the prefix cache.
        generated_tokens: tokens generated.
        finished: answers that ran to their end; a request may want several.
        failed: those that ended with an error, by its code.
        passes: inferences after prefill, of requests with speculation.
        proposed: drafts that these passes checked, by drafter.
        accepted: those that were right, by drafter.
        first_token: seconds from a request to its first token.
        token: seconds from each token to the next.
        gauges: sessions and bytes.
        is_reproducible: whether output is independent of what is cached of a prompt.
    """

    answers: dict[tuple[str, int], int] = field(default_factory=dict)
    disconnects: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_S))
    token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_S))
    gauges: EngineGauges = field(default_factory=EngineGauges)
    is_reproducible: bool = False

    def count_answer(self, path: str, status: int) -> None:
        """Count an HTTP answer."""
        self.answers[path, status] = self.answers.get((path, status), 0) + 1

    def count_token(self, seconds: float, *, is_first: bool) -> None:
        """Count a token, seconds after the one before, or after the request."""
        self.generated_tokens += 1
        (self.first_token if is_first else self.token).observe(seconds)

    def count_prompt(self, tokens: int, reused: int, restored: int) -> None:
        """Count the tokens of the prompt of an answer that has a token."""
        self.prompt_tokens += tokens
        self.reused_tokens += reused
        self.restored_tokens += restored

    def count_drafts(self, stats: SpeculationStats) -> None:
        """Count the drafts of such an answer."""
        self.passes += stats.passes
        for name, counts in stats.drafters.items():
            self.proposed[name] = self.proposed.get(name, 0) + counts.proposed
            self.accepted[name] = self.accepted.get(name, 0) + counts.accepted

    def count_failed(self, error: ApiError) -> None:
        """Count an answer that ended early."""
        code = error.code or str(error.status)
        self.failed[code] = self.failed.get(code, 0) + 1

    def text(self, compiling_grammars: int = 0) -> str:
        """All of them, and the grammars that are compiled now, as Prometheus reads them."""
        gauges = self.gauges
        lines: list[str] = []

        def add(name: str, kind: str, about: str, samples: Iterator[str]) -> None:
            lines.append(f"# HELP edgekv_{name} {about}")
            lines.append(f"# TYPE edgekv_{name} {kind}")
            lines.extend(samples)

        def one(name: str, kind: str, about: str, value: int) -> None:
            add(name, kind, about, iter([f"edgekv_{name} {value}"]))

        add(
            "http_responses_total",
            "counter",
            "HTTP answers.",
            (
                f'edgekv_http_responses_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self.answers.items())
            ),
        )
        add(
            "requests_failed_total",
            "counter",
            "Answers that ended early, by error code.",
            (f'edgekv_requests_failed_total{{code="{code}"}} {n}' for code, n in sorted(self.failed.items())),
        )
        one("requests_finished_total", "counter", "Answers that ran to their end.", self.finished)
        one("disconnects_total", "counter", "Clients that left before the end of their answer.", self.disconnects)
        one("requests_queued", "gauge", "Requests that wait for a session.", gauges.queued)
        one("requests_running", "gauge", "Requests that take turns.", gauges.running)
        one("prompt_tokens_total", "counter", "Tokens of the prompts of all answers.", self.prompt_tokens)
        one("prompt_tokens_reused_total", "counter", "Prompt tokens that were not computed.", self.reused_tokens)
        about = "Prompt tokens that came from the prefix cache."
        one("prompt_tokens_restored_total", "counter", about, self.restored_tokens)
        one("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens)
        name = "time_to_first_token_seconds"
        add(name, "histogram", "From a request to its first token.", self.first_token.lines(f"edgekv_{name}"))
        name = "time_per_token_seconds"
        add(name, "histogram", "From each token of an answer to the next.", self.token.lines(f"edgekv_{name}"))
        if self.passes:
            one("decode_passes_total", "counter", "Inferences after prefill, with speculation.", self.passes)
            for name, counts in (("draft_tokens_total", self.proposed), ("draft_tokens_accepted_total", self.accepted)):
                about = f"Drafted tokens{' that were right' if counts is self.accepted else ''}, by drafter."
                samples = (f'edgekv_{name}{{drafter="{drafter}"}} {n}' for drafter, n in sorted(counts.items()))
                add(name, "counter", about, samples)
        if gauges.batch_passes:
            about = "Inferences that advanced several answers."
            one("batch_passes_total", "counter", about, gauges.batch_passes)
            one("batch_tokens_total", "counter", "Tokens that they brought.", gauges.batch_tokens)
        about = "Grammars that are compiled, with those that take too long."
        one("grammars_compiling", "gauge", about, compiling_grammars)
        one("sessions", "gauge", "Sessions with a cache.", gauges.sessions)
        one("sessions_busy", "gauge", "Sessions that a request uses.", gauges.busy)
        one("session_bytes", "gauge", "Bytes of the caches of sessions.", gauges.session_bytes)
        one("session_evictions_total", "counter", "Sessions evicted under memory pressure.", gauges.evictions)
        about = "Whether output is independent of what is cached of a prompt."
        one("reproducible", "gauge", about, int(self.is_reproducible))
        one("prefix_cache_blocks", "gauge", "Blocks of the prefix cache in memory.", gauges.prefix_blocks)
        one("prefix_cache_bytes", "gauge", "Bytes of these blocks.", gauges.prefix_bytes)
        one("prefix_cache_hits_total", "counter", "Lookups that found a prefix.", gauges.prefix_hits)
        one("prefix_cache_misses_total", "counter", "Lookups that found none.", gauges.prefix_misses)
        about = "Files of the prefix cache that are broken or foreign."
        one("prefix_cache_rejected_files_total", "counter", about, gauges.rejected_files)
        return "\n".join(lines) + "\n"
