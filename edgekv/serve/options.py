"""The options of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from edgekv.draft.speculation import Speculation
from edgekv.errors import UsageError, refuse
from edgekv.machine.system import read_file
from edgekv.option import Option, OptionGroup
from edgekv.runtime.load_options import OnFullOption, check_on_full

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "EDGEKV_API_KEY"
"""The environment variable with an accepted key."""
_LONGEST_FILE_BYTES = 1 << 20
_VISIBLE = "visible ASCII characters without spaces"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may use.

    Attributes:
        body_bytes: bytes of a request to a model that reads text alone.
        picture_body_bytes: of one to a model that reads pictures: base64 of the largest file, and text.
        large_bytes: of all requests above `body_bytes` together, until they are answered.
        header_bytes: bytes of the headers of a request.
        header_s: seconds until the headers of a request are complete.
        body_s: seconds until its body is.
        send_s: seconds until a client takes a piece of the answer.
        connections: open at once: idle ones make room for others; requests beyond are answered with 503.
        stored_responses: answers of `/v1/responses` that later requests can continue, of each API key.

    Raises:
        UsageError: a number below 1, or no time at all.
    """

    sessions: Annotated[int, Option("Conversations with a cache, running or idle.", "--max-sessions")] = 16
    queue: Annotated[int, Option("Requests that may wait; further ones get 429.", "--max-queue")] = 64
    request_s: Annotated[
        float, Option("Seconds from a request to the end of its answer, with its time in the queue.", "--timeout")
    ] = 600.0
    body_bytes: int = 4 << 20
    picture_body_bytes: int = 48 << 20
    large_bytes: int = 192 << 20
    header_bytes: int = 32 << 10
    header_s: float = 10.0
    body_s: float = 30.0
    send_s: float = 30.0
    connections: int = 512
    stored_responses: int = 256

    def __post_init__(self) -> None:
        sizes = "body_bytes", "picture_body_bytes", "large_bytes", "header_bytes"
        for name in ("sessions", "queue", *sizes, "connections", "stored_responses"):
            if getattr(self, name) < 1:
                raise UsageError(name, got=getattr(self, name), expected="at least 1", fix="Leave it out.")
        for name in ("request_s", "header_s", "body_s", "send_s"):
            if not 0 < getattr(self, name) < 1e6:
                got = getattr(self, name)
                raise UsageError(name, got=got, expected="seconds, above 0 and below 1,000,000", fix="Leave it out.")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        keys: API keys that are accepted; empty for no authentication.
        speculate: how answers are drafted; None for no drafts.
        logs_requests: whether each request gets a line on standard error.

    Raises:
        UsageError: a port out of range, drafts in passes of several answers, or another `on_full`.
    """

    host: Annotated[str, Option("Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 for a free one.")] = 8080
    name: Annotated[str | None, Option("The model's id in the API.", shown="the name of the folder")] = None
    keys: tuple[str, ...] = field(default=(), repr=False)
    origins: Annotated[
        tuple[str, ...], Option("Web origin whose pages may call the API; repeat for several.", "--cors")
    ] = ()
    limits: Annotated[Limits, OptionGroup("Limits")] = field(default_factory=Limits)
    speculate: Speculation | None = None
    batches: Annotated[
        bool, Option("Advance several answers in one pass of a verify graph; not on the CPU.", "--batch")
    ] = False
    logs_requests: bool = False
    on_full: OnFullOption = "drop-oldest"

    def __post_init__(self) -> None:
        check_on_full(self.on_full)
        if self.batches and self.speculate is not None:
            refuse("batch", "passes of several answers with --speculate", "one of them", "Leave one of them out.")
        if not 0 <= self.port < 1 << 16:
            raise UsageError("port", got=self.port, expected="0 to 65535", fix="Use 8080, or 0 for a free one.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK


def accepted_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """The keys of a server: one that the command line or the environment gives, and those of a file.

    Raises:
        UsageError: an empty key, one with characters that a header cannot have, or a file without keys.
    """
    if key is not None and not _is_visible(key):
        # The key itself is a secret, so the message does not have it.
        got = "other characters" if key else "an empty key"
        fix = f"Correct --api-key, or the environment variable {KEY_VARIABLE}."
        raise UsageError("API key", got=got, expected=_VISIBLE, fix=fix)
    return (*(() if key is None else (key,)), *(() if file is None else read_keys(file)))


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with # are left out.

    Raises:
        UsageError: it cannot be read, has no key, or one with characters that a header cannot have.
    """
    fix = "Write one key a line."
    try:
        lines = read_file(path, _LONGEST_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise UsageError(str(path), got=reason, expected="a file of API keys", fix=fix) from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    for number, key in enumerate(keys, 1):
        if not _is_visible(key):
            raise UsageError(f"{path}: key {number}", got="other characters", expected=_VISIBLE, fix=fix)
    if not keys:
        raise UsageError(str(path), got="no key", expected="at least one", fix=fix)
    return keys


def _is_visible(key: str) -> bool:
    return key != "" and key.isascii() and key.isprintable() and " " not in key
