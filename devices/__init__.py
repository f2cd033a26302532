"""The chips that edgekv can target, by part number, marketing name or product. Knows nothing of models."""

from devices.catalogue import CATALOGUE as CATALOGUE
from devices.device import Device as Device
from devices.lookup import (
    DeviceSearch as DeviceSearch,
    UnknownDeviceError as UnknownDeviceError,
    find as find,
    search as search,
)
from devices.measured import MeasuredSpeed as MeasuredSpeed, measured_speed as measured_speed
from devices.memory import Memory as Memory
from devices.other_names import OtherName as OtherName
from devices.published import (
    PUBLISHED_SOURCE as PUBLISHED_SOURCE,
    PublishedSpeed as PublishedSpeed,
    nearest_published as nearest_published,
    published_speeds as published_speeds,
)
from devices.report import Report as Report, ReportError as ReportError, read_report as read_report
from devices.simulated import (
    NoProxyError as NoProxyError,
    Proxy as Proxy,
    find_proxy as find_proxy,
    proxies_for as proxies_for,
)
from devices.speed import FASTEST_PASS_S as FASTEST_PASS_S, DecoderSpeed as DecoderSpeed, Span as Span
