"""Server-sent events, as the HTML standard defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgekv.serve.channel import Channel
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Event
from edgekv.serve.exchange import Exchange

FIRST_S = 1.0
"""How long the headers wait for the first event: errors within this time have a status of their own."""
WAITING_S = 15.0
"""Proxies close a connection that is silent for a minute."""
WAITING = b": waiting\n\n"
"""A comment, which clients skip."""
DONE = b"data: [DONE]\n\n"
"""Ends a stream of completions."""


def event(data: bytes, name: str | None = None) -> bytes:
    """An event; the data is JSON, which has no line break outside of its texts' escapes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + data + b"\n\n"


async def stream(
    exchange: Exchange, channel: Channel, head: bytes, told: Callable[[Sequence[Event]], tuple[bytes, bool]]
) -> None:
    """Answer with the events of a job, and with comments while there are none.

    Args:
        exchange: the request.
        channel: of the job.
        head: sent first.
        told: what is sent for events, and whether it is the end.

    Raises:
        ApiError: the job failed before the answer began.
        DisconnectedError: the client has gone.
    """
    events = await channel.take(FIRST_S)
    if events and isinstance(events[0], ApiError):
        raise events[0]
    await exchange.begin_events()
    data = head
    while True:
        more, is_last = told(events)
        data += more
        if data or not events:
            await exchange.send_events(data or WAITING, more=not is_last)
        if is_last:
            return
        data, events = b"", await channel.take(WAITING_S)
