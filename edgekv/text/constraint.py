"""Constrained decoding: which tokens a grammar allows next, and which it forces."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from time import monotonic
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BusyError, EngineError, UsageError, refuse
from edgekv.text.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_Key = tuple[str | None, Grammar]
"""A salt and a grammar."""
COMPILE_LIMIT_S = 5.0
MAX_COMPILING = 4
"""Threads that compile; one that takes too long cannot be stopped, and counts until it ends."""
MAX_LEXER_STATES = 50_000
"""Of a text while it is generated; a state has 1 to 2 kB."""
_KEPT = 64
MAX_DIGITS = 20
"""As many as a 64-bit integer has."""
_DIGITS = b"0123456789"
_QUOTE, _BACKSLASH = b'"\\'
_SHOWN_CHARACTERS = 300
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python's `json.dumps` and the `tojson` of chat templates write JSON. Free whitespace could go on without end."""


class Constraint(Protocol):
    """The state of a text under a constraint."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and can have no further token."""

    def allowed(self) -> NDArray[np.intp]:
        """Ids of the tokens that may come next, ascending; at least one unless the text is complete.

        Raises:
            UsageError: the grammar has become too complex at this point of the text.
        """

    def forced(self) -> list[int]:
        """The tokens that have to come next, as far as they are known; often none."""

    def continued(self, drafts: Sequence[int], max_tokens: int) -> list[int]:
        """Drafts as far as they are allowed, then the forced tokens, at most `max_tokens`; the text stays."""

    def push(self, token: int) -> None:
        """Continue the text with an allowed token."""


class GrammarConstraint:
    """A text under a grammar that llguidance has compiled.

    The tokens of forced bytes are those that the tokenizer gives for them, and only those that do not depend on what
    follows.
    """

    def __init__(self, matcher: LLMatcher, grammar: Grammar, vocab: int, digits: Digits | None = None) -> None:
        """A constraint at the start of a text.

        Args:
            matcher: its state.
            grammar: for errors.
            vocab: number of the model's logits.
            digits: bounds numbers; None if nothing does.
        """
        self._matcher = matcher
        self._grammar = grammar
        self._vocab = vocab
        self._digits = digits

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.intp]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocab])
        return allowed if self._digits is None else self._digits.bounded(allowed)

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        outside = (at for at, token in enumerate(tokens) if token >= self._vocab)
        return tokens[: next(outside, len(tokens))]

    def continued(self, drafts: Sequence[int], max_tokens: int) -> list[int]:
        matcher = self._matcher.deep_copy()
        allowed = list(drafts[: matcher.validate_tokens(list(drafts))])
        matcher.consume_tokens(allowed)
        tokens = [*allowed, *matcher.compute_ff_tokens()][:max_tokens]
        outside = (at for at, token in enumerate(tokens) if token >= self._vocab)
        return tokens[: next(outside, len(tokens))]

    def push(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()
        if self._digits is not None:
            self._digits.push(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._grammar, self._matcher.get_error())


class Digits:
    """Where a JSON text is within a number, whose integer, fraction and exponent have at most MAX_DIGITS digits each.

    JSON's grammar lets each of them run on without end, and models that repeat themselves do.
    """

    def __init__(self, leading: NDArray[np.int64], text_of: Callable[[int], bytes]) -> None:
        """At the start of a text.

        Args:
            leading: how many digits each token begins with, `[V]`.
            text_of: the bytes of a token.
        """
        self._leading = leading
        self._text_of = text_of
        self._is_string = self._is_escaped = False
        self._run = 0

    def bounded(self, allowed: NDArray[np.intp]) -> NDArray[np.intp]:
        """The allowed tokens without those that make a number too long, unless the schema asks for nothing else."""
        if not self._run:
            return allowed
        kept = allowed[self._leading[allowed] <= max(0, MAX_DIGITS - self._run)]
        return kept if kept.size else allowed

    def push(self, token: int) -> None:
        """Continue the text."""
        for byte in self._text_of(token):
            if self._is_string:
                self._is_string = self._is_escaped or byte != _QUOTE
                self._is_escaped = byte == _BACKSLASH and not self._is_escaped
            else:
                self._is_string = byte == _QUOTE
                self._run = self._run + 1 if byte in _DIGITS else 0


class _Compilation:
    """A grammar that is compiled in a thread of its own.

    Attributes:
        result: once it has ended, and an error if it failed.
    """

    def __init__(self, compile: Callable[[], LLMatcher], at_end: Callable[[], None]) -> None:
        self.result: LLMatcher | BaseException | None = None
        self._started = monotonic()
        self._compile = compile
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name="edgekv grammar", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        """Whether it has ended, or does so soon. Unlike an event's, an interrupted wait keeps nobody from ending it."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @property
    def is_late(self) -> bool:
        """Whether it takes too long."""
        return monotonic() - self._started > COMPILE_LIMIT_S

    def _run(self) -> None:
        try:
            self.result = self._compile()
        except BaseException as error:  # a panic of the library is no Exception
            self.result = error
        self._at_end()


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; the last 64 grammars are kept, also as refused.

    What was compiled for one salt makes nothing faster for others: the time would tell what others ask for.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Collection[int]) -> None:
        """Compile nothing yet.

        Args:
            tokenizer: of the bundle.
            vocab: number of the model's logits.
            eos: tokens that end a text.

        Raises:
            EngineError: llguidance is not installed.
            UsageError: llguidance cannot read the tokenizer, or the model has no end-of-sequence token.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise EngineError(
                "llguidance", got=error, expected="the library", fix='Install it: pip install "edgekv[serve]"'
            ) from None
        if not eos:
            refuse("grammar", "a model without an end-of-sequence token", "one", "Export a checkpoint that names one.")
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            self._tokenizer: LLTokenizer = LLTokenizer(
                tokenizer.to_str(), n_vocab=max(size, vocab), eos_token=sorted(eos)
            )
        except ValueError as error:
            refuse("grammar", f"a tokenizer that llguidance cannot read: {error}", "another tokenizer", "Leave it out.")
        self._vocab = vocab
        self._lock = threading.Lock()  # taken itself: Ctrl-C may come within the methods of a condition
        self._changed = threading.Condition(self._lock)
        self._kept: OrderedDict[_Key, LLMatcher | UsageError] = OrderedDict()
        self._compiling: dict[_Key, _Compilation] = {}

    @property
    def compiling(self) -> int:
        """Grammars that are compiled now, with those that take too long."""
        return len(self._compiling)

    def has(self, grammar: Grammar, salt: str | None = None) -> bool:
        """Whether a grammar is compiled, so that `compile` takes no time and refuses nothing."""
        return not isinstance(self._kept.get((salt, grammar)), (UsageError, NoneType))

    def compile(self, grammar: Grammar, salt: str | None = None) -> GrammarConstraint:
        """A constraint at the start of a text.

        Raises:
            UsageError: the grammar is wrong, uses what is not supported, or is too complex.
            BusyError: it takes too long, or too many others are compiled. What is late may be the machine: a later call
                finds how the compilation ended.
        """
        key = salt, grammar
        with self._lock:
            kept = self._kept.get(key)
            running = self._started(key) if kept is None else None
        if running is not None:  # without the lock: compiled grammars need not wait for this one
            if not running.has_ended(0 if running.is_late else COMPILE_LIMIT_S):
                got, expected = f"one that does not compile within {COMPILE_LIMIT_S:g} s", "one that does"
                raise BusyError(grammar.field, got=got, expected=expected, fix="Try again later, or simplify it.")
            kept = _outcome(grammar, running.result)
        assert kept is not None
        with self._lock:
            self._keep(key, kept)
            if not isinstance(kept, UsageError):
                digits = Digits(self._leading_digits, self._text_of) if grammar.kind == "json_schema" else None
                return GrammarConstraint(kept.deep_copy(), grammar, self._vocab, digits)
        raise UsageError(kept.field, got=kept.got, expected=kept.expected, fix=kept.fix)

    @cached_property
    def _leading_digits(self) -> NDArray[np.int64]:
        """How many digits each token begins with, `[V]`."""
        texts = (self._text_of(token) for token in range(self._vocab))
        return np.array([len(text) - len(text.lstrip(_DIGITS)) for text in texts])

    def _text_of(self, token: int) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token]))

    def is_special(self, token: int) -> bool:
        """Whether a token is written by its id in grammars, not by its text."""
        return bool(self._tokenizer.is_special_token(token))

    def _started(self, key: _Key) -> _Compilation:
        """The compilation of a grammar, one for all who ask; the caller has the lock.

        Raises:
            BusyError: too many others run; at once if all of them take too long.
        """

        def is_free() -> bool:
            return key in self._compiling or self.compiling < MAX_COMPILING

        if any(not compilation.is_late for compilation in self._compiling.values()):
            self._changed.wait_for(is_free, COMPILE_LIMIT_S)
        if key not in self._compiling:
            if self.compiling >= MAX_COMPILING:
                got, expected = f"{self.compiling} others that compile", f"fewer than {MAX_COMPILING}"
                raise BusyError(key[1].field, got=got, expected=expected, fix="Try again later.")
            self._compiling[key] = _Compilation(lambda: self._matcher(key[1]), lambda: self._end(key))
        return self._compiling[key]

    def _end(self, key: _Key) -> None:
        with self._lock:
            compilation = self._compiling.pop(key, None)  # none if Ctrl-C came before it was noted
            if compilation is not None:
                self._keep(key, _outcome(key[1], compilation.result))
            self._changed.notify_all()

    def _keep(self, key: _Key, outcome: LLMatcher | UsageError) -> None:
        """Keep how a compilation ended; the caller has the lock."""
        self._kept[key] = outcome
        self._kept.move_to_end(key)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _llguidance_text(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars are found to be empty here
        return matcher


def _outcome(grammar: Grammar, result: LLMatcher | BaseException | None) -> LLMatcher | UsageError:
    if isinstance(result, BaseException):
        return _refused(grammar, result)
    assert result is not None
    return _refused(grammar, result.get_error()) if result.is_error() else result


def _llguidance_text(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        options: Any = SEPARATORS
        return LLMatcher.grammar_from_json_schema(grammar.schema(), overrides=options)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _refused(grammar: Grammar, reason: object) -> UsageError:
    if str(reason).startswith("NoExtension"):
        reason = "one that no text satisfies"
    lines = [line.strip() for line in str(reason).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("<"))[:_SHOWN_CHARACTERS]
    expected = "one that llguidance supports and that has a text"
    return UsageError(grammar.field, got=text, expected=expected, fix="Correct or simplify it.")
