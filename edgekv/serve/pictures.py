"""Pictures in messages of the API: data URIs alone, since the server fetches nothing."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from edgekv.engine.pictures import Pictures
from edgekv.pictures import Picture
from edgekv.serve.errors import refused

URL_PART = "image_url"
MOST_PICTURES = 32
"""Of a request: more than any context has room for."""

_DATA = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
_WANTED = "a data URI: data:image/png;base64,..."


class MessagePictures:
    """Opens the pictures of a request's messages, which number them in order.

    Attributes:
        found: so far.
    """

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self.found: list[Picture] = []

    def number(self, part: Mapping[str, Any], field: str) -> int:
        """The number of the picture of a part.

        Its content says what kind of picture it is, whatever the URI says.

        Raises:
            ApiError: no data URI of a picture, or too many pictures.
            UsageError: the bundle reads text alone, or the picture is damaged, animated or too large.
        """
        _ = self._pictures.spec  # before anything is decoded
        given = part.get(URL_PART)
        url = given.get("url") if isinstance(given, dict) else given
        at = f"{field}.{URL_PART}.url"
        if not isinstance(url, str) or (start := _DATA.match(url)) is None:
            found = url[:40] if isinstance(url, str) else type(url).__name__
            fix = "Send the picture itself: the server fetches nothing."
            raise refused(at, got=repr(found), expected=_WANTED, fix=fix)
        if len(self.found) == MOST_PICTURES:
            raise refused(at, got="one more", expected=f"at most {MOST_PICTURES} pictures", fix="Send fewer.")
        try:
            content = b64decode(url[start.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise refused(at, got=error, expected="whole base64", fix="Encode the picture again.") from None
        self.found.append(self._pictures.open(content, at))
        return len(self.found) - 1
