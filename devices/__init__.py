"""The chips that edgekv can target, by part number, marketing name or product. Knows nothing of models."""

from devices.catalogue import CATALOGUE
from devices.device import Device
from devices.lookup import DeviceSearch, UnknownDeviceError, find, search
from devices.measured import MeasuredSpeed, measured_speed
from devices.memory import Memory
from devices.other_names import OtherName
from devices.published import SOURCE as PUBLISHED_SOURCE, PublishedSpeed, nearest_published, published_speeds
from devices.report import Report, ReportError, read_report
from devices.simulated import NoProxyError, Proxy, find_proxy, proxies_for
from devices.speed import FASTEST_PASS_S, DecoderSpeed, Span

__all__ = [
    "CATALOGUE",
    "FASTEST_PASS_S",
    "PUBLISHED_SOURCE",
    "DecoderSpeed",
    "Device",
    "DeviceSearch",
    "MeasuredSpeed",
    "Memory",
    "NoProxyError",
    "OtherName",
    "Proxy",
    "PublishedSpeed",
    "Report",
    "ReportError",
    "Span",
    "UnknownDeviceError",
    "find",
    "find_proxy",
    "measured_speed",
    "nearest_published",
    "proxies_for",
    "published_speeds",
    "read_report",
    "search",
]
