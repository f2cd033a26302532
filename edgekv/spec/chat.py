"""Chat templates: from messages to the prompt that a model was trained on.

Templates come with the checkpoint and are programs in Jinja. They are untrusted, so they are compiled and rendered by a
child process, in Jinja's immutable sandbox, with limits on time, memory, loops and output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekv.errors import CheckpointError, EdgeKVError, UsageError
from edgekv.json_file import read_json
from edgekv.sandbox import (
    LARGEST_PROMPT_CHARACTERS,
    LIMIT_BYTES,
    LIMIT_S,
    TemplateFailedError,
    TemplateLimitError,
    compile_apart,
    render_apart,
)

FILE = "chat_template.json"
DEFAULT = "default"
ROLES = ("system", "developer", "user", "assistant", "tool")

LARGEST_TEMPLATE_BYTES = 1 << 20
_LARGEST_FILE_BYTES = 1 << 24

Message = Mapping[str, Any]
"""A message: `role`, `content`, and other fields that the template knows, such as `tool_calls`."""


class ChatTemplates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat templates of a model.

    Attributes:
        templates: Jinja source by name; `default` and, for some models, `tool_use` or others.
        tokens: special tokens that templates use as variables, such as `bos_token`.
        reads_parts: whether a content is a list of parts, as templates of models that read pictures want it.
    """

    templates: dict[str, str]
    tokens: dict[str, str] = {}
    reads_parts: bool = False

    def check(self, field: str, error: type[EdgeKVError] = CheckpointError) -> None:
        """Reject templates that Jinja cannot compile.

        Args:
            field: name of the templates in the error.
            error: its type.

        Raises:
            EdgeKVError: of the type `error`, naming the template and the line.
        """
        for name, source in self.templates.items():
            found = f"{len(source):,} characters" if len(source) > LARGEST_TEMPLATE_BYTES else None
            try:
                if found is None:
                    compile_apart(source)
            except (TemplateFailedError, TemplateLimitError) as reason:
                found = str(reason)
            if found is not None:
                raise error(
                    f"{field}: template {name}",
                    got=found,
                    expected=f"a Jinja template of at most {LARGEST_TEMPLATE_BYTES:,} characters",
                    fix="Correct the template, or remove it.",
                )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, as Hugging Face transformers renders it.

        Args:
            messages: the turns so far, each with a `role` and a `content`.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the start of the assistant's turn.
            name: of the template; None for `tool_use` if there are tools and such a template, else `default`.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: a message is malformed, no such template, or the template refuses the messages, fails, or
                exceeds the limits.
        """
        check_messages(messages)
        chosen = name or ("tool_use" if tools and "tool_use" in self.templates else DEFAULT)
        if chosen not in self.templates:
            raise UsageError(
                "chat template",
                got=f"no template {chosen!r}",
                expected=" or ".join(self.templates) or "a chat template in the checkpoint",
                fix="Give a prompt instead of messages, or export a checkpoint with a chat template.",
            )
        if self.reads_parts:
            messages = [_in_parts(message) for message in messages]
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return render_apart(self.templates[chosen], {**self.tokens, **given, **variables})
        except (TemplateFailedError, TypeError, ValueError, RecursionError) as reason:
            raise UsageError(
                f"chat template {chosen}",
                got=reason,
                expected="messages that the template accepts",
                fix="Check the order of the roles; many templates want user and assistant in turn.",
            ) from None
        except TemplateLimitError as reason:
            raise UsageError(
                f"chat template {chosen}",
                got=reason,
                expected=f"a template that ends within {LIMIT_S:g} s, {LIMIT_BYTES >> 20:,} MiB and "
                f"{LARGEST_PROMPT_CHARACTERS:,} characters",
                fix="The template of this model is not usable.",
            ) from None


IMAGE_PART = "image"
"""The `type` of a part of a content that stands for a picture; its `picture` is the picture's number."""


def pictures_in(messages: Sequence[Message]) -> list[int]:
    """The numbers of the pictures in messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part.get("picture", 0) for part in parts if isinstance(part, dict) and part.get("type") == IMAGE_PART]


def _in_parts(message: Message) -> Message:
    """A message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def check_messages(messages: Sequence[Message]) -> None:
    """Reject malformed messages.

    Raises:
        UsageError: naming the message.
    """
    if not messages:
        raise UsageError("messages", got="none", expected="at least one", fix="Add a message with the role user.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"messages[{number}]",
                got=type(message).__name__,
                expected="an object with role and content",
                fix='Use {"role": "user", "content": "..."}.',
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UsageError(
                f"messages[{number}].role", got=repr(role)[:80], expected=" or ".join(ROLES), fix="Use user or system."
            )
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise UsageError(
                f"messages[{number}].content", got=type(content).__name__, expected="text", fix="Give a string."
            )


def read_checkpoint_templates(folder: Path) -> ChatTemplates | None:
    """The templates of a Hugging Face folder: `chat_template.jinja` first, then `tokenizer_config.json`.

    None if there is none.

    Raises:
        CheckpointError: a file is broken, or a template cannot be compiled.
    """
    config = _read_object(folder / "tokenizer_config.json")
    templates = _configured(config.get("chat_template"), folder / "tokenizer_config.json")
    for path in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            templates[DEFAULT if path.parent == folder else path.stem] = _read_text(path)
    if not templates:
        return None
    tokens = {name: _token(config.get(name)) for name in config if name.endswith("_token")}
    found = ChatTemplates(templates=templates, tokens={name: text for name, text in tokens.items() if text is not None})
    found.check(str(folder))
    return found


def read_bundle_templates(folder: Path) -> ChatTemplates | None:
    """The templates of a bundle; None if it has none.

    Raises:
        BundleError: the file was not written by an export.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    return read_json(path, ChatTemplates, expected="the chat templates of an export", fix="Export the bundle again.")


def write_templates(templates: ChatTemplates, folder: Path) -> None:
    """Write templates into a bundle's folder."""
    (folder / FILE).write_bytes(msgspec.json.encode(templates))


def _configured(value: object, path: Path) -> dict[str, str]:
    """Templates of `tokenizer_config.json`: one as text, or several as a list of names and templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else []
    found = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if len(found) != len(entries) or not found:
        raise CheckpointError(
            f"{path}: chat_template",
            got=type(value).__name__,
            expected="a template, or a list of objects with name and template",
            fix="Fetch tokenizer_config.json again.",
        )
    return found


def _token(value: object) -> str | None:
    """A special token, which is text or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        found = error
    if isinstance(found, dict):
        return found
    raise CheckpointError(str(path), got=str(found)[:80], expected="a JSON object", fix="Fetch it again.")


def _read_text(path: Path) -> str:
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        limit = f"at most {_LARGEST_FILE_BYTES:,} bytes"
        raise CheckpointError(str(path), got=f"{size:,} bytes", expected=limit, fix="Fetch it again.")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), got=error, expected="UTF-8 text", fix="Fetch it again.") from None
