"""The chips that edgekv can target, by part number, marketing name or product. Knows nothing of models."""

from devices.catalogue import CATALOGUE
from devices.device import Device
from devices.lookup import Found, UnknownDeviceError, find, search
from devices.memory import Memory
from devices.other_names import OtherName
from devices.published import SOURCE as PUBLISHED_SOURCE, PublishedSpeed, nearest_published, published_speeds
from devices.simulated import NoProxyError, Proxy, find_proxy, proxies_for
from devices.speed import FASTEST_PASS_S, DecoderSpeed, Span

__all__ = [
    "CATALOGUE",
    "FASTEST_PASS_S",
    "PUBLISHED_SOURCE",
    "DecoderSpeed",
    "Device",
    "Found",
    "Memory",
    "NoProxyError",
    "OtherName",
    "Proxy",
    "PublishedSpeed",
    "Span",
    "UnknownDeviceError",
    "find",
    "find_proxy",
    "nearest_published",
    "proxies_for",
    "published_speeds",
    "search",
]
