"""Chats: the settings of a chat, its messages before the template, and its text after it.

Configurations, rows, requests and the tokenizer all check chats here. Around a template the same happens as in
transformers 5.23 (`PreTrainedTokenizerBase.apply_chat_template` and `render_jinja_template`), with two stricter rules:
roles are strings, and content is text or parts of text; and a more lenient one: where a template does not loop over the
parts of a message's content, they are joined by line breaks, as vLLM joins them.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_KEYS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Settings of a chat: keys of a configuration, of a row, and of a request."""
TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Arguments that every template gets. The variables of `chat_template_kwargs` have other names."""
_RESERVED = {
    **dict.fromkeys(
        TEMPLATE_ARGUMENTS,
        "is a parameter of its own; give it beside chat_template_kwargs",
    ),
    "conversation": "is given as messages",
    **dict.fromkeys(
        ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        "is no variable of a template; the text is returned, to be encoded afterwards",
    ),
}
"""Names that `chat_template_kwargs` may not have, and why."""


def check_chat_settings(given: Mapping[str, Any], path: str = "") -> None:
    """Check values of `CHAT_KEYS`. Raises: ValueError for one of the wrong type, or two that exclude each other.

    Args:
        path: prefix of the keys in messages.
    """
    for key, value in given.items():
        if key == "chat_template_kwargs":
            check_template_kwargs(value, path)
            continue
        if key == "tools":
            fits, expected = isinstance(value, list) and all(isinstance(t, dict) for t in value), "a list of objects"
        else:
            fits, expected = type(value) is bool, "true or false"
        if not fits:
            raise ValueError(f"{path}{key} is {reprlib.repr(value)}; expected {expected}")
    check_end(given.get("add_generation_prompt", False), given.get("continue_final_message", False), path)


def check_end(add_generation_prompt: object, continue_final_message: object, path: str = "") -> None:
    """Raises: ValueError if a chat has both ends: the start of the next turn, and an unfinished message."""
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            f"{path}add_generation_prompt and {path}continue_final_message are both true; a chat either continues its "
            "last message or begins another: to continue it, set add_generation_prompt=False"
        )


def check_template_kwargs(kwargs: Any, path: str = "") -> None:
    """Check variables that a caller adds to a chat template, and `chat_template`, the name of a template.

    Raises: ValueError naming a key that is no variable name, or is reserved.
    """
    where = f"{path}chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"{where} is {type(kwargs).__name__}; expected a mapping of names to values")
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{where} has the key {reprlib.repr(name)}; expected the name of a template's variable")
        if name in _RESERVED:
            raise ValueError(f"{where}: {name!r} {_RESERVED[name]}")
        if name == "chat_template" and not isinstance(kwargs[name], str | None):
            kind = type(kwargs[name]).__name__
            raise ValueError(f"{where}: chat_template is {kind}; expected the name of one of the model's templates")


# Messages

MAX_MESSAGES = 10_000
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first."""
_WITH_CONTENT = ("system", "developer", "user")
"""Roles whose messages have a content; others may have calls or reasoning instead."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text that marks the end of the message to be continued in the rendered text."""
_PART_SEPARATOR = "\n"

Message = dict[str, object]


def check_messages(messages) -> None:
    """Check that `messages` is a list of 1 to `MAX_MESSAGES` mappings with a role and a content of text, which only
    users and systems need.

    The bound keeps a request from running a good template into the limits that exist against bad ones.

    Raises: ValueError naming the message and its part that is no text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list of {role, content} mappings")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages has {len(messages)} entries; expected at most {MAX_MESSAGES}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
            raise ValueError(f"messages[{i}] is {reprlib.repr(message)}; expected a mapping with role and content")
        role = message.get("role")
        if role is None and ("prompt" in message or "prompt_token_ids" in message):
            raise ValueError(
                f"messages[{i}] is a mapping with a prompt and has no role; give text or token ids themselves, or "
                "Request(prompt) or Request(prompt_token_ids=...)"
            )
        if role is None:
            raise ValueError(f"messages[{i}] has no role; expected one such as user, assistant or system")
        if not isinstance(role, str):
            raise ValueError(f"messages[{i}].role is {type(role).__name__}; expected a string such as user")
        content = message.get("content")
        if content is None and role in _WITH_CONTENT and not message.get("tools"):
            raise ValueError(f"messages[{i}], of the role {role}, has no content; expected text, or parts of text")
        _check_content(content, f"messages[{i}].content")


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str | None):
        return
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{where} is {type(content).__name__}; expected a string or a list of parts of text")
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
            raise ValueError(f'{where}[{i}] is {reprlib.repr(part)}; expected {{"type": "text", "text": ...}}')
        if part.get("type") != "text":
            raise ValueError(
                f"{where}[{i}] is a part of type {reprlib.repr(part.get('type'))}; only parts of type 'text' are "
                "supported"
            )
        if not isinstance(part.get("text"), str):
            kind = type(part["text"]).__name__ if "text" in part else "absent"
            raise ValueError(f"{where}[{i}].text is {kind}; expected a string")


def check_tools(tools) -> None:
    """Raises: ValueError unless `tools` is None or a list of JSON schemas."""
    if tools is None:
        return
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise ValueError(f"tools is {type(tools).__name__}; expected a list of JSON schemas")
    for i, tool in enumerate(tools):
        if callable(tool):
            name = getattr(tool, "__name__", type(tool).__name__)
            raise ValueError(f"tools[{i}] is the function {name}; expected its JSON schema, a mapping")
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{i}] is {reprlib.repr(tool)}; expected a JSON schema, a mapping")


def prepared(messages: Sequence[Mapping[str, object]], *, takes_parts: bool) -> list[Message]:
    """Copies of checked messages, in the form that templates expect.

    Entries that are None are left out: APIs write `content: null` for an absent content, and templates would print it.
    Reasoning is given under each of the keys that templates read.

    Args:
        takes_parts: whether the template loops over the parts of a content; else parts are joined.
    """
    return [_prepared(message, takes_parts) for message in messages]


def _prepared(message: Mapping[str, object], takes_parts: bool) -> Message:
    result: Message = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, (list, tuple)):
        if takes_parts:
            result["content"] = [dict(part) for part in content]
        else:
            result["content"] = _PART_SEPARATOR.join(part["text"] for part in content)
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def tag_final_message(messages: list[Message], field: str, source: str) -> str:
    """Mark the end of the last message.

    Args:
        messages: from `prepared`; the last is changed.
        field: key of the entry that is continued.
        source: the template.
    Returns: the text that is continued.
    Raises: ValueError if the message lacks the field, or the template does not read it.
    """
    final = messages[-1]
    text = final.get(field)
    if text is None:
        raise ValueError(f"continue_final_message: the last message has no {field!r} to continue")
    fields = [name for name in _REASONING if final.get(name) == text] if field in _REASONING else [field]
    if not any(name in source for name in fields):
        raise ValueError(
            f"continue_final_message: the chat template does not read {field!r}, so it cannot be continued"
        )
    if isinstance(text, list):
        part = next(
            (part for part in reversed(text) if isinstance(part, dict) and isinstance(part.get("text"), str)), None
        )
        if part is None:
            raise ValueError("continue_final_message: the last message has no part of text to continue")
        text = part["text"]
        part["text"] = text + _TAG
        return text
    if not isinstance(text, str):
        raise ValueError(f"continue_final_message: {field!r} of the last message is {type(text).__name__}, not text")
    final.update({name: text + _TAG for name in fields})
    return text


def cut_at_tag(rendered: str, text: str) -> str:
    """The rendered chat up to the end of the last message, whose text is `text`.

    Raises: ValueError if the template has not written that message in full.
    """
    if text.strip() not in rendered or _TAG.strip() not in rendered:
        raise ValueError(
            "continue_final_message: the last message is not in what the chat template gives, which may drop parts of "
            f"it; the message begins {reprlib.repr(text.strip())}"
        )
    end = rendered.rindex(_TAG.strip())
    if rendered[end : end + len(_TAG)] == _TAG:
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims its messages
