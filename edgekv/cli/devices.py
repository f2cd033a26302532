"""`edgekv devices`: the chips to export for, by the names that people know."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from devices import Device, DeviceSearch, search
from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.option import Argument

_MIXED = "* has another maker's chip in some countries; edgekv means the one with Qualcomm's."


@command
def devices(
    output: Output,
    word: Annotated[
        str, Argument("Part of a name: a product, a chip, or an HTP version, such as s24, 8 gen 3 or V75.")
    ] = "",
) -> None:
    """Any of the names can be given as --device."""
    result = search(word)
    if output.as_json:
        others = [asdict(other) for other in result.others]
        print_json({"devices": [_record(device) for device in result.devices], "others": others})
        return
    _show(result)


def _record(device: Device) -> dict[str, Any]:
    """A chip for `--json`."""
    return {
        "soc": device.soc,
        "soc_model": device.soc_model,
        "htp": device.arch,
        "vtcm_mib": device.vtcm_mb,
        "kv_dtypes": device.kv_dtypes,
        "dram": str(device.memory),
        "dram_gb_per_s": device.dram_gb_per_s,
        "dram_confirmed": device.memory.confirmed,
        "names": device.aliases,
        "products": device.products,
        "mixed_products": device.mixed_products,
    }


def _show(result: DeviceSearch) -> None:
    console = Console(markup=False, highlight=False)
    for other in result.others:
        console.print(f"{other.name}: {other.meaning}", soft_wrap=True)
    if not result.devices:
        return
    table = Table("chip", "soc_model", "HTP", "VTCM", "KV cache", "DRAM, at most", "names and products")
    for device in result.devices:
        names = [*device.aliases, *device.products, *(f"{name} *" for name in device.mixed_products)]
        table.add_row(
            device.soc,
            str(device.soc_model),
            f"V{device.arch}",
            f"{device.vtcm_mb} MiB",
            ", ".join(device.kv_dtypes),
            f"{device.dram_gb_per_s:.0f} GB/s",
            ", ".join(names),
        )
    console.print(table)
    if any(device.mixed_products for device in result.devices):
        console.print(_MIXED, soft_wrap=True)
