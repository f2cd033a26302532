"""The `qai_hub` client with a token, and its exceptions as edgekv's errors. The token is never printed or written."""

from __future__ import annotations

import configparser
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edgekv.errors import EngineError, ServiceError, UsageError

if TYPE_CHECKING:
    import qai_hub

_WHERE = "Copy the API token from https://workbench.aihub.qualcomm.com/account/ and run: qai-hub configure --api_token"
_AGAIN = "Run the same command again: what was submitted is picked up."
_FRAME = re.compile(r"[┌┐└┘─|]+")
_UNAUTHORIZED, _NOT_FOUND = 401, 404


@dataclass(frozen=True, slots=True)
class Account:
    """A configured client.

    Attributes:
        client: the package's own client, with its progress bars off.
        service: host and port that it talks to.
    """

    client: qai_hub.Client
    service: str

    @contextmanager
    def asking(self, what: str) -> Iterator[qai_hub.Client]:
        """The client, for one request. What it prints is dropped: standard output belongs to the command.

        Raises:
            ServiceError: the service refused, failed or could not be reached.
        """
        import qai_hub.client
        import requests
        from botocore.exceptions import BotoCoreError, ClientError
        from qai_hub.public_rest_api import APIException

        # The client asserts what the service must answer, and hands files to Amazon's own client.
        known = (
            *(qai_hub.client.Error, APIException, requests.RequestException),
            *(BotoCoreError, ClientError, ValueError, AssertionError),
        )
        try:
            with redirect_stdout(io.StringIO()):
                yield self.client
        except known as error:
            raise self._translated(what, error) from None

    def _translated(self, what: str, error: Exception) -> ServiceError:
        import qai_hub.client

        status = _status_of(error)
        text = _plain(str(error).replace(self.client.config.api_token, "***")) or type(error).__name__
        if status == _UNAUTHORIZED:
            text, expected, fix = "an API token that the service rejects", "a valid API token", f"{_WHERE} TOKEN"
        elif status == _NOT_FOUND:
            expected, fix = "an object that the service still has", "Submit it again with --force."
        elif isinstance(error, qai_hub.client.RateLimitedError):
            expected, fix = "fewer jobs at a time", f"Wait a few minutes. {_AGAIN}"
        elif isinstance(error, qai_hub.client.UserError):
            expected, fix = (
                "a request that the service accepts",
                "Correct what it names, then run the same command again.",
            )
        else:
            expected, fix = f"a response from {self.service}", _AGAIN
        return ServiceError(f"AI Hub: {what}", got=text, expected=expected, fix=fix)


def connect(profile: str | None = None) -> Account:
    """The client as `qai-hub configure` set it up, without asking the service anything.

    Args:
        profile: the configuration `~/.qai_hub/PROFILE.ini`; None for `client.ini`, or for the file that
            QAIHUB_CLIENT_INI names.

    Raises:
        EngineError: the package `qai_hub` is missing.
        UsageError: no token is configured, or the configuration cannot be used.
    """
    try:
        import qai_hub
        from qai_hub import api_utils
    except ImportError as error:
        raise EngineError(
            "package qai_hub", got=error, expected="Qualcomm's client", fix='Install it: pip install "edgekv[hub]"'
        ) from None
    from qai_hub.public_rest_api import APIException

    file = Path(api_utils.get_config_path(profile))
    fix = f"{_WHERE} TOKEN" + (f" --profile {profile}" if profile else "")
    expected = "api_token, api_url and web_url in [api]"
    try:
        config = api_utils.load_api_config_from_file(str(file))
    except FileNotFoundError:
        got = "no such file"
    except APIException:
        got = "a field too few"
    except (configparser.Error, ValueError, OSError) as error:  # their texts would quote the file
        got = f"an unreadable file ({type(error).__name__})"
    else:
        # Anything else is refused here: the HTTP library's own complaint would quote it.
        if re.fullmatch(r"[!-~]+", config.api_token):
            host = urlsplit(config.api_url)
            if host.scheme in ("http", "https") and host.hostname:
                config.verbose = False
                port = f":{host.port}" if host.port else ""
                return Account(qai_hub.Client(config=config), host.hostname + port)
            got, expected = "an api_url that is no address", "https://workbench.aihub.qualcomm.com"
        else:
            got, expected = "an api_token that is empty or not plain text", "the token of your account"
    raise UsageError(f"AI Hub configuration {file}", got=got, expected=expected, fix=fix)


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an exception of the client, which hides it in its context."""
    while error is not None:
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None


def _plain(text: str) -> str:
    """One line, without the frames that the client draws for terminals."""
    return " ".join(_FRAME.sub(" ", text).split()).rstrip(".")
