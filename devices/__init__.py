"""The chips that edgekv can target, by part number, marketing name or product. Knows nothing of models."""

from devices.catalogue import CATALOGUE
from devices.device import Device
from devices.lookup import UnknownDeviceError, find
from devices.memory import Memory
from devices.speed import DecoderSpeed, Span

__all__ = ["CATALOGUE", "DecoderSpeed", "Device", "Memory", "Span", "UnknownDeviceError", "find"]
