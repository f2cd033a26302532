"""The HTML templates of the reports of `eval` and `sweep`."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from edgekv.machine.system import format_bytes
from exporters.inspect.show import number

_SHARED = "exporters.inspect.page"


def find_template(package: str, name: str) -> Template:
    """A template of a package; what it includes may stand beside it or among the charts and styles of this one.

    Values are escaped, and a name that is not given is an error. Filters: `bytes` and `number`.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(_SHARED, ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "number": number}
    return environment.get_template(name)
