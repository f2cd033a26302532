"""Chat templates: from messages to the prompt that a model was trained on.

Templates come with the checkpoint and are programs in Jinja. They are untrusted, so they are compiled and rendered by a
child process, in Jinja's immutable sandbox, with limits on time, memory, loops and output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekv.errors import CheckpointError, EdgeKVError, UsageError
from edgekv.machine.json_file import read_json
from edgekv.spec.template_sandbox import (
    LARGEST_PROMPT_CHARACTERS,
    LIMIT_BYTES,
    LIMIT_S,
    TemplateFailedError,
    TemplateLimitError,
    compile_sandboxed,
    render_sandboxed,
)

FILE = "chat_template.json"
DEFAULT = "default"
ROLES = ("system", "developer", "user", "assistant", "tool")

LARGEST_TEMPLATE_BYTES = 1 << 20
_LARGEST_FILE_BYTES = 1 << 24

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

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

        Raises:
            EdgeKVError: of the type `error`, naming the template and the line.
        """
        for name, source in self.templates.items():
            problem = f"{len(source):,} characters" if len(source) > LARGEST_TEMPLATE_BYTES else None
            try:
                if problem is None:
                    compile_sandboxed(source)
            except (TemplateFailedError, TemplateLimitError) as reason:
                problem = str(reason)
            if problem is not None:
                raise error(
                    f"{field}: template {name}",
                    got=problem,
                    expected=f"a Jinja template of at most {LARGEST_TEMPLATE_BYTES:,} characters",
                    fix="Correct the template, or remove it.",
                )

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, as Hugging Face transformers renders it.

        A field that is null is left out. A template that needs a content where there is none gets an empty one.

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
        told = [_as_told(message) for message in messages]
        if self.reads_parts:
            told = [_in_parts(message) for message in told]
        arguments = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        shared = {**self.tokens, **arguments, **variables}
        try:
            try:
                return render_sandboxed(self.templates[chosen], {"messages": told, **shared})
            except TemplateFailedError:
                if all("content" in message for message in told):
                    raise
                empty: object = [] if self.reads_parts else ""
                whole = [{"content": empty, **message} for message in told]
                return render_sandboxed(self.templates[chosen], {"messages": whole, **shared})
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


def _as_told(message: Message) -> dict[str, Any]:
    """A message without fields that are null, and with the model's thoughts under all names that templates read."""
    told = {name: value for name, value in message.items() if value is not None}
    thoughts = next((told[name] for name in _THOUGHTS if name in told), None)
    return told if thoughts is None else {"thinking": thoughts, **told, _THOUGHTS[0]: thoughts}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
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
        for name in ("function_call", "audio"):
            if message.get(name) is not None:
                fix = "Use tool_calls." if name == "function_call" else "Leave it out."
                raise UsageError(f"messages[{number}].{name}", got="a value", expected="nothing", fix=fix)
        if not isinstance(content, (str, list)) and not (content is None and role in ("assistant", "tool")):
            raise UsageError(
                f"messages[{number}].content", got=type(content).__name__, expected="text", fix="Give a string."
            )


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
