"""One answer on the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from edgekv.engine import Generation, Scoring, Speculate, SpeculationStats, StopReason, Token
from edgekv.model import Model
from edgekv.serve.channel import Channel
from edgekv.serve.events import Event, Finished, FinishReason, Piece, PromptLogprobs
from edgekv.serve.logprobs import Likelihood, TokenLogprob, token_logprob
from edgekv.text import SamplingParams, Tools

_SEEDS = 1 << 64
_REASONS: dict[StopReason | None, FinishReason] = {
    "eos": "stop",
    "stop": "stop",
    "grammar": "stop",
    "length": "length",
    "context": "length",
    None: "stop",
}


@dataclass(frozen=True, slots=True)
class Work:
    """What one answer asks of the engine.

    Attributes:
        prompt: token ids, as `Model.read` gives them.
        params: how to sample; None generates nothing.
        salt: prefixes and caches are shared only between equal salts.
        top_logprobs: how many of the most likely tokens to report at each position; None for no log-probabilities.
        scored_tokens: this many tokens at the end of the prompt are scored too.
        tools: functions that the answer may call; the prompt declares them.
        lora: adapters of the bundle, as `Model.generate` takes them; None for the base model.
    """

    prompt: tuple[int, ...]
    params: SamplingParams | None
    salt: str | None = None
    top_logprobs: int | None = None
    scored_tokens: int = 0
    tools: Tools | None = None
    lora: str | None = None

    def for_answer(self, number: int) -> Work:
        """The work of one of several answers: with a seed, each has its own, from the given one up."""
        if number == 0 or self.params is None or self.params.seed is None:
            return self
        return replace(self, params=replace(self.params, seed=(self.params.seed + number) % _SEEDS))

    def shares_prompt(self, other: Work) -> bool:
        """Whether rows that are computed for one prompt are those of the other."""
        return (self.prompt, self.lora) == (other.prompt, other.lora)


class Job:
    """The work of one answer, done in steps of the engine's thread. Its events go to the channel of its request.

    Attributes:
        work: what to do.
        leader: an earlier job of the same request with the same prompt: this one starts after its prompt has run, and
            takes the computed rows from the prefix cache.
        is_closed: whether it has ended.
        arrived: when it was made, in seconds of `perf_counter`.
        deadline: when it must have ended, likewise.
        is_cancelled: whether nobody waits for it any more; set from any thread.
        sequence: id of the sequence it runs in; None before it has one.
        generated_tokens: tokens generated so far.
        token_s: of the last step, seconds to each token from the one before, or from the arrival.
    """

    def __init__(
        self, work: Work, channel: Channel, time_limit_s: float, index: int = 0, leader: Job | None = None
    ) -> None:
        self.work = work
        self.leader = leader
        self.is_closed = False
        self._channel = channel
        self._index = index
        self.arrived = perf_counter()
        self.deadline = self.arrived + time_limit_s
        self.is_cancelled = False
        self.sequence: int | None = None
        self.generated_tokens = 0
        self.token_s: list[float] = []
        self._last_token = self.arrived
        self._generation: Generation | None = None
        self._scoring: Scoring | None = None
        self._scored: list[TokenLogprob] = []
        self._is_prefilled = False

    @property
    def scores(self) -> bool:
        """Whether it needs the model's own session."""
        return self.work.scored_tokens > 0

    def start(self, model: Model, sequence: int | None, speculate: Speculate | None = None) -> None:
        """Get ready for steps.

        Args:
            model: an open model.
            sequence: id of the sequence to run in; None for a job that generates nothing.
            speculate: how the answer is drafted.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        work, self.sequence = self.work, sequence
        if self.scores:
            self._scoring = model.score_steps(work.prompt, lora=work.lora)
        if work.params is not None:
            assert sequence is not None
            self._generation = model.generate(
                work.prompt,
                work.params,
                sequence=sequence,
                cache_salt=work.salt,
                return_logits=work.top_logprobs is not None,
                tools=work.tools,
                speculate=speculate,
                lora=work.lora,
            )

    def step(self, prefill_tokens: int) -> Finished | None:
        """Run a step of the graphs, which may bring several tokens; the last one returns the end of the answer.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        self.token_s.clear()
        if self._scoring is not None:
            return self._score(self._scoring)
        generation = self._generation
        assert generation is not None
        if not self._is_prefilled:
            self._is_prefilled = not generation.prefill(prefill_tokens)
            if not self._is_prefilled:
                return None
        while True:
            token = next(generation)
            self._put(token, generation.stop_reason)
            if generation.stop_reason is not None:
                return self._finished(generation)
            if generation.needs_pass:
                return None

    def close(self) -> None:
        """Free what it holds; computed rows are kept for later requests."""
        self.is_closed = True
        if self._scoring is not None:
            self._scoring.close()
        if self._generation is not None:
            self._generation.close()

    def tell(self, event: Event) -> None:
        """Send an event to the request, from any thread."""
        self._channel.put(self._index, event)

    @property
    def waits_for_leader(self) -> bool:
        """Whether another job is computing its prompt."""
        return self.leader is not None and not (self.leader.generated_tokens or self.leader.is_closed)

    @property
    def answer(self) -> Generation | None:
        """What it generates; None before its prompt has run."""
        return self._generation if self._is_prefilled else None

    @property
    def speculation(self) -> SpeculationStats | None:
        """What drafts brought; None without speculation."""
        return None if self._generation is None else self._generation.stats.speculation

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return 0 if self._generation is None else self._generation.stats.cache.reused_tokens

    @property
    def restored_tokens(self) -> int:
        """The part of them that came from the prefix cache."""
        return 0 if self._generation is None else self._generation.stats.cache.restored_tokens

    def _put(self, token: Token, reason: StopReason | None) -> None:
        """Send a token; `reason` is why it is the last one."""
        self.generated_tokens += 1
        now = perf_counter()
        self.token_s.append(now - self._last_token)
        self._last_token = now
        logprob = None
        if token.logits is not None and reason != "eos":
            logprob = token_logprob(token.logits, token.id, self.work.top_logprobs or 0)
        self.tell(Piece(token.text, logprob, token.tool_calls))

    def _finished(self, generation: Generation) -> Finished:
        stats = generation.stats
        drafts = stats.speculation
        accepted, rejected = (0, 0) if drafts is None else (drafts.accepted, drafts.proposed - drafts.accepted)
        reason, cached, generated = _REASONS[stats.stop_reason], stats.cache.reused_tokens, stats.generated_tokens
        return Finished(reason, stats.prompt_tokens, cached, generated, accepted, rejected)

    def _score(self, scoring: Scoring) -> Finished | None:
        """Score the next tokens of the prompt. Row i of the logits judges token i+1."""
        prompt, top = self.work.prompt, self.work.top_logprobs or 0
        if not self._scored:
            self._scored.append(TokenLogprob(Likelihood(prompt[0], 0.0), is_first=True))
        for row in next(scoring):
            if len(self._scored) < len(prompt):
                self._scored.append(token_logprob(row, prompt[len(self._scored)], top))
        if len(self._scored) < len(prompt):
            return None
        scoring.close()
        self._scoring = None
        self.tell(PromptLogprobs(tuple(self._scored[-self.work.scored_tokens :])))
        return Finished("length", len(prompt), 0, 0) if self._generation is None else None
