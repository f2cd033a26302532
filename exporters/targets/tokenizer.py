"""A bundle's tokenizer, as runtimes read it that know one chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from edgekv.bundle import Bundle
from edgekv.machine.json_file import read_json, readable_json
from edgekv.spec.chat import DEFAULT, read_bundle_templates
from edgekv.spec.text import TOKENIZER, TOKENIZER_CONFIG


def copy_tokenizer(bundle: Bundle, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; of several chat templates, the latter has the default one."""
    shutil.copyfile(bundle.path / TOKENIZER, folder / TOKENIZER)
    path = bundle.path / TOKENIZER_CONFIG
    config = read_json(path, dict[str, Any], expected="the file of an export", fix="Export the bundle again.")
    config.pop("chat_template", None)
    if (templates := read_bundle_templates(bundle.path)) is not None and DEFAULT in templates.templates:
        config["chat_template"] = templates.templates[DEFAULT]
    (folder / TOKENIZER_CONFIG).write_bytes(readable_json(config))
