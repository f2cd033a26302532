"""What transformers makes of tokenizer files and chat templates, kept so that the tests need no transformers.

    python tests/golden/texts.py            write it
    python tests/golden/texts.py --check    compute it again and compare with the stored values

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, ProcessorMixin
from transformers.utils import logging

from edgekv.errors import CheckpointError
from exporters.checkpoint.checkpoint import Checkpoint
from tests.support.checkpoints import write_checkpoint, write_tokenizer

FILE = Path(__file__).with_suffix(".json")
TEXTS = ("a<|9|>b", "a <|9|> b", "<|0|>a</s>b", "<|2|>user:<|im_start|> a <|img|>", "Hi , you .")
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "  What is 2 & 3? "},
    {"role": "assistant", "content": None, "reasoning_content": "It is easy.", "tool_calls": None},
    {"role": "user", "content": [{"type": "text", "text": "And é?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 3, "a": [2]}}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}},
        },
    }
]
CHATML = (
    "{% for message in messages %}{{'<|2|>' + message['role'] + ':' + (message['content'] or '') + '<|1|>'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|2|>assistant:' }}{% endif %}"
)

ADDED = {"content": "<|9|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
FIELDS: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": True,
    "add_prefix_space": True,
    "added_tokens_decoder": {"260": {**ADDED, "special": True}},
    "additional_special_tokens": ["<|9|>", "<|im_start|>"],
    "auto_map": {"AutoTokenizer": ["tokenization.MyTokenizer", None]},
    "backend": "tokenizers",
    "bos_token": "<|0|>",
    "chat_control_tokens": ["<|0|>"],
    "chat_template": "{{ bos_token }}",
    "clean_up_tokenization_spaces": True,
    "cls_token": "</s>",
    "eos_token": {"__type": "AddedToken", **ADDED},
    "errors": "replace",
    "extra_special_tokens": {"image_token": "<|img|>"},
    "fix_mistral_regex": True,
    "image_token": "<|img|>",
    "is_local": True,
    "legacy": False,
    "mask_token": "<|9|>",
    "max_length": 2,
    "max_len": 2,
    "model_input_names": ["input_ids"],
    "model_max_length": 2,
    "model_specific_special_tokens": {"boi_token": "<|img|>"},
    "name_or_path": "org/other",
    "pad_to_multiple_of": 8,
    "pad_token": "<|9|>",
    "pad_token_type_id": 1,
    "padding_side": "left",
    "processor_class": "MyProcessor",
    "response_schema": {"type": "object"},
    "sep_token": "</s>",
    "sp_model_kwargs": {},
    "special_tokens_map_file": "elsewhere.json",
    "split_special_tokens": True,
    "stride": 1,
    "tokenizer_class": "Qwen3TokenizerFast",
    "tokenizer_file": "/elsewhere/tokenizer.json",
    "truncation": True,
    "truncation_side": "left",
    "truncation_strategy": "longest_first",
    "unk_token": "<|9|>",
    "use_default_system_prompt": True,
    "use_fast": False,
    "vocab_file": "elsewhere.model",
}
"""A value of each field of tokenizer_config.json that a class of transformers reads or published files have."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "added tokens of tokenizer_config.json": {
        "tokenizer_config.json": {"added_tokens_decoder": {"260": {**ADDED, "special": True}}}
    },
    "added tokens that change flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "256": {**ADDED, "content": "<|0|>", "special": True},
                "258": {**ADDED, "content": "<|2|>", "lstrip": True, "rstrip": True, "special": True},
                "260": {**ADDED, "lstrip": True, "rstrip": True, "special": False},
            },
            "pad_token": "<|9|>",
        }
    },
    "added_tokens.json": {"added_tokens.json": {"<|9|>": 260, "<|img|>": 261}},
    "special_tokens_map.json": {
        "special_tokens_map.json": {
            "eos_token": {**ADDED, "rstrip": True},
            "bos_token": "<|0|>",
            "additional_special_tokens": ["<|im_start|>"],
        },
    },
    "special_tokens_map.json beside added_tokens_decoder does not count": {
        "tokenizer_config.json": {"added_tokens_decoder": {}, "bos_token": "<|0|>"},
        "special_tokens_map.json": {"bos_token": "<|1|>", "eos_token": "<|9|>"},
    },
    "both sidecars": {
        "special_tokens_map.json": {"eos_token": "<|9|>", "unk_token": None},
        "added_tokens.json": {"<|9|>": 260, "<|im_start|>": 261},
        "tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<|0|>"},
    },
    "lists and objects of further tokens": {
        "tokenizer_config.json": {
            "extra_special_tokens": ["<|9|>", {"__type": "AddedToken", **ADDED, "content": "<|img|>", "lstrip": True}],
            "boi_token": {"__type": "AddedToken", **ADDED, "content": "<|im_start|>"},
        }
    },
    "a file of a template replaces those of the configuration": {
        "tokenizer_config.json": {
            "bos_token": "<|0|>",
            "chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}],
        },
        "chat_template.jinja": "new{{ bos_token }}",
    },
    "files of several templates": {
        "chat_template.jinja": "new",
        "additional_chat_templates/tool_use.jinja": "{{ tools | length }} tools",
    },
    "templates of the configuration": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        },
    },
}
"""Files of published checkpoints and earlier releases of transformers."""

RANDOM_LAYOUTS = 50


def random_layouts() -> dict[str, dict[str, Any]]:
    """Files whose tokens contradict each other in names, flags and order."""
    random = Random(1)
    contents = ["<|0|>", "<|1|>", "<|3|>", "<|9|>", "</s>", "<|img|>", "a", "<|im_start|>"]

    def token(content: str, **further: Any) -> dict[str, Any]:
        flags = ("lstrip", "rstrip", "normalized", "single_word")
        return {"content": content, **{flag: random.random() < 0.3 for flag in flags}, **further}

    def some(typed: dict[str, Any]) -> Any:
        content = random.choice(contents)
        return random.choice([content, token(content, **typed)])

    def named(typed: dict[str, Any]) -> dict[str, Any]:
        names = ("pad_token", "image_token", "eos_token", "boi_token", "bos_token", "unk_token")
        found = {name: some(typed) for name in names if random.random() < 0.35}
        if random.random() < 0.3:
            found["additional_special_tokens"] = random.sample(contents, random.randrange(3))
        return found

    def config() -> dict[str, Any]:
        typed = {"__type": "AddedToken"}
        found = named(typed)
        if random.random() < 0.3:
            content = random.choice(contents)
            found["extra_special_tokens"] = random.choice([{"video_token": content}, [some(typed), some(typed)]])
        if random.random() < 0.2:
            found["model_specific_special_tokens"] = {"audio_token": random.choice(contents)}
        if random.random() < 0.5:
            known = [(number, f"<|{number - 256}|>") for number in range(256, 260) if random.random() < 0.3]
            added = [*known, *enumerate(random.sample(["<|9|>", "</s>", "<|img|>"], random.randrange(4)), 260)]
            found["added_tokens_decoder"] = {str(n): token(text, special=random.random() < 0.6) for n, text in added}
        return found

    layouts = {}
    for number in range(RANDOM_LAYOUTS):
        files = {"tokenizer_config.json": config()}
        if random.random() < 0.4:
            files["special_tokens_map.json"] = named({})
        if random.random() < 0.3:
            files["added_tokens.json"] = {text: at for at, text in enumerate(random.sample(["<|9|>", "</s>"], 2), 260)}
        layouts[f"random {number}"] = files
    return layouts


TEMPLATES = [
    CHATML,
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}|{{ nothing }}",
    "{{ documents is defined }}{{ documents is none }}{{ tools is not none }}{{ tools is defined }}"
    "{{ xml is defined }}",
    "{{ '  ' * 3 }}|{{ 2 * 'ab' }}|{{ [0] * 3 }}|{{ 3 * (1, 2) }}|{{ 'x' * 0 }}|{{ 'x' * -1 }}|{{ 2 * 3.5 }}",
    "{% generation %}a{{ messages | length }}{% endgeneration %}b",
    "{% set x = 1 %}{%- generation -%}\n{% set x = 2 %}{{ x }}{%- endgeneration -%}\n{{ x }}",
    "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools[0] | tojson(sort_keys=true) }}",
    "{{ messages[0] | tojson(ensure_ascii=true) }}{{ messages[3] | tojson(separators=(',', ':')) }}{{ 'é<' | tojson }}",
    "{{ tools | tojson(true) }}{{ tools | tojson(false, 1) }}",
    "{{ tools | tojson(default=1) }}",
    "{{ messages[0].content | e }}{{ messages[1].content | trim }}|{{ messages[1].content.strip() }}|",
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace({'a': 1}, self=2) %}{{ ns.a }}{{ ns.self }}{{ ns.missing is defined }}",
    "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['a'], 0) }}{{ dict([['k', 'v']]).k }}",
    "{{ dict.__class__ }}",
    "{% macro say(m, end='!') %}[{{ m.role }}{{ end }}]{{ varargs }}{% endmacro %}{{ say(messages[0]) }}"
    "{{ say(messages[1], '?', 1) }}",
    "{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}in{% endcall %}",
    "{% macro walk(x) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:{{ walk(v) }};{% endfor %}"
    "{% else %}{{ x }}{% endif %}{% endmacro %}{{ walk(tools[0]) }}",
    "{% for m in messages[1:] %}{{ m.role[:2] }}{{ m.role[::-1] }}{% endfor %}{{ messages[-1].role }}",
    "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.length }}{{ loop.revindex }}"
    "{{ loop.previtem.role if loop.previtem is defined }}{{ loop.depth }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ m.role }}{% else %}none{% endfor %}",
    "{% for k, v in messages[4].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    "{% for k, v in messages[4].tool_calls[0].function.arguments | items %}{{ k }}{% endfor %}",
    "{% for m in messages %}{{ m.content is string }}{{ m.content is none }}{{ m.content is defined }}"
    "{{ 'content' in m }}{{ m.content is iterable }}{{ m.tool_calls is defined }}{{ m.content }}|{% endfor %}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning is defined }}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endfor %}",
    "{{ messages | map(attribute='role') | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('content', 'defined') | list | length }}{{ messages | groupby('role') | length }}",
    "{{ 'a,b'.split(',') }}{{ 'Ab'.lower() }}{{ 'ab'.title() }}{{ 'ab'.startswith('a') }}{{ 'x'.join(['1', '2']) }}"
    "{{ ' ab '.lstrip() }}{{ 'ab'.replace('a', 'c') }}{{ '%s-%d' % ('a', 3) }}{{ '{}'.format(1) }}{{ 'ab' ~ 1 }}",
    "{{ messages[0].get('role') }}{{ messages[0].get('x', 'y') }}{{ messages[0].keys() | list }}{{ 1 if true }}",
    "{{ ('a' in 'abc') and not false }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ 1 / 4 }}{{ -3 | abs }}{{ 3.0 | int }}",
    "{% set a, b = (1, 2) %}{{ a }}{{ b }}{% set t %}x{{ a }}{% endset %}{{ t }}{{ [3, 1, 2] | sort | first }}",
    "{% if messages[0].role == 'system' %}s{% elif true %}e{% else %}n{% endif %}{# gone #}{% raw %}{{ raw }}"
    "{% endraw %}",
    "{% set x = {'a': [1, {'b': none}]} %}{{ x }}{{ x['a'][1]['b'] }}{{ none }}{{ true }}{{ x.a[5] is defined }}",
    "{{ raise_exception('no ' + messages[0].role) }}",
    "{{ strftime_now('%%') }}{{ strftime_now(format='%Y') | length }}",
    "{% filter upper %}x{{ 1 }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}{{ range(3) | list }}"
    "{{ lipsum is defined }}",
    "{{ messages[0].content['x'] }}|{{ messages[0]['content'] | length }}|{{ messages | last | attr('role') }}",
    "{% for m in messages %}{{ '<|2|>' + m['role'] + m['content'] }}{% endfor %}",
    "{%- for message in messages %}\n    {%- if true %}\n  text\n    {% endif %}\n{% endfor %}",
    "{{ enable_thinking is defined and enable_thinking is false }}{{ mood | default('none') }}"
    "{{ '' | default('d', true) }}",
    "{% do messages.append(1) %}",
    "{{ messages.append(1) }}",
    "{{ joiner is defined }}{{ cycler is defined }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{{ '\\n' }}{{ \"a\\tb\" }}{{ 'x' | indent(2, true) }}{{ 'a b c' | wordcount }}{{ 'abcdef' | truncate(4) }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ 'a' is in ['a'] }}{{ 3 is odd }}{{ 'x' | upper | lower }}"
    "{{ [1, [2]] | string }}",
]

PROCESSORS: dict[str, dict[str, Any]] = {
    "chat_template.json": {"chat_template.json": {"chat_template": "json"}},
    "processor_config.json first": {
        "processor_config.json": {"processor_class": "MyProcessor", "chat_template": "config"},
        "chat_template.json": {"chat_template": "json"},
        "chat_template.jinja": "jinja",
    },
    "chat_template.json before chat_template.jinja": {
        "chat_template.json": {"chat_template": "json"},
        "chat_template.jinja": "jinja",
    },
    "chat_template.json beside further templates": {
        "chat_template.json": {"chat_template": "json"},
        "additional_chat_templates/tool_use.jinja": "tools",
    },
    "files of several templates": {
        "chat_template.jinja": "jinja",
        "additional_chat_templates/tool_use.jinja": "tools",
    },
}
"""Templates of processors."""

GENERATION = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]


def folder_of(scratch: Path, files: dict[str, Any]) -> Path:
    """The tests' tokenizer, and files beside it."""
    scratch.mkdir(parents=True)
    write_tokenizer(scratch / "tokenizer.json")
    for name, content in files.items():
        (scratch / name).parent.mkdir(exist_ok=True)
        (scratch / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return scratch


def read(folder: Path, kind: Any = PreTrainedTokenizerFast) -> dict[str, Any]:
    """What transformers makes of a folder, or None where it fails."""
    try:
        tokenizer = kind.from_pretrained(folder)
    except Exception as error:
        return {"error": type(error).__name__}
    rendered = None
    if tokenizer.chat_template is not None:
        rendered = [rendered_by(tokenizer, [{"role": "user", "content": "x"}], tools) for tools in (None, TOOLS)]
    return {
        "ids": [tokenizer(text, add_special_tokens=True)["input_ids"] for text in TEXTS],
        "named": tokenizer.special_tokens_map,
        "special": sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        "rendered": rendered,
    }


def read_processor(folder: Path) -> dict[str, str] | None:
    """The templates of a folder's processor, or None where transformers refuses it."""
    try:
        found, _ = ProcessorMixin.get_processor_dict(folder)
    except ValueError:
        return None
    templates = found["chat_template"]
    return {"default": templates} if isinstance(templates, str) else templates


def differing_in_bundles(scratch: Path, layouts: dict[str, dict[str, Any]]) -> list[str]:
    """Layouts that transformers' `AutoTokenizer` reads otherwise from a bundle than from the checkpoint."""
    model, found = write_checkpoint(scratch / "model"), []
    for case, files in layouts.items():
        folder, bundle = folder_of(scratch / case, files), scratch / f"bundle of {case}"
        if "error" in (expected := read(folder)):
            continue
        for path in model.iterdir():
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
        try:
            checkpoint = Checkpoint.open(str(folder))
        except CheckpointError:
            continue
        bundle.mkdir()
        checkpoint.write_tokenizer(bundle)
        got = read(bundle, AutoTokenizer)
        named = expected["named"] if checkpoint.chat is not None else got["named"]
        if got != expected | {"named": named} or not expected["named"].items() <= named.items():
            found.append(f"{case}: got {got}; expected {expected}")
    return found


def rendered_by(tokenizer: Any, messages: Any, tools: Any, template: str | None = None) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception:
        return None
    return text


def saved(scratch: Path) -> dict[str, dict[str, Any]]:
    """Files that `save_pretrained` writes."""
    folder = folder_of(scratch / "source", {})
    made = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<|0|>", eos_token="</s>")
    made.add_tokens([AddedToken("<|9|>", lstrip=True)])
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    named = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens={"image_token": "<|img|>"})
    found = {}
    for name, tokenizer, template, options in (
        ("one template", made, CHATML, {}),
        ("several templates", made, {"default": "a", "tool_use": "{{ tools | length }}"}, {}),
        ("templates in the configuration", made, {"default": "a", "tool_use": "b"}, {"save_jinja_files": False}),
        ("named tokens", named, "{{ image_token }}{{ eos_token }}", {}),
    ):
        tokenizer.chat_template = template
        target = scratch / name
        tokenizer.save_pretrained(target, **options)
        files = [path for path in sorted(target.rglob("*")) if path.is_file()]
        found[f"saved: {name}"] = {str(path.relative_to(target)): path.read_text() for path in files}
    return found


def make() -> dict[str, Any]:
    """All cases with what transformers makes of them."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        layouts = LAYOUTS | saved(scratch / "saved") | random_layouts()
        if differing := differing_in_bundles(scratch / "bundles", layouts):
            sys.exit("\n".join(differing))
        fields = {field: {"tokenizer_config.json": {field: value}} for field, value in FIELDS.items()}
        found: dict[str, Any] = {"texts": TEXTS, "messages": MESSAGES, "tools": TOOLS, "generation": GENERATION}
        for kind, cases in (("layouts", layouts), ("fields", fields)):
            found[kind] = {
                case: {"files": files, **read(folder_of(scratch / kind / case, files))} for case, files in cases.items()
            }
        found["processors"] = {
            case: {"files": files, "templates": read_processor(folder_of(scratch / "processors" / case, files))}
            for case, files in PROCESSORS.items()
        }
        plain = PreTrainedTokenizerFast.from_pretrained(
            folder_of(scratch / "plain", {}), bos_token="<|0|>", eos_token="<|1|>", image_token="<|3|>"
        )
        found["named"] = plain.special_tokens_map
        found["templates"] = [[each, rendered_by(plain, MESSAGES, TOOLS, each)] for each in TEMPLATES]
        kept: dict[str, Any] = json.loads(json.dumps(found))
        return kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check, made = parser.parse_args().check, make()
    if not is_check:
        lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in made.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif made != json.loads(FILE.read_text()):
        sys.exit(f"{FILE}: out of date")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    main()
