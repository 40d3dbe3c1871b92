"""Messages on their way into a chat template, and the text on its way out: what transformers does around a template.

Source: transformers 5.23, `PreTrainedTokenizerBase.apply_chat_template` and `render_jinja_template`. Two rules are
stricter: roles are strings, and content is text or parts of text. One is more lenient: where a template does not loop
over the parts of a message's content, they are joined by line breaks, as vLLM joins them.
"""

import reprlib
from collections.abc import Mapping, Sequence

MAX_MESSAGES = 10_000
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is given; templates read the first."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the message that is to be continued, so that its end is found in the rendered text."""
_PART_SEPARATOR = "\n"

Message = dict[str, object]


def check_messages(messages) -> None:
    """Check that `messages` is a list of mappings with a role and, if any, a content of text.

    Their number is from 1 to `MAX_MESSAGES`: with more, a request could bring a good template to its limits, which are
    there against bad ones.

    Raises: ValueError naming the message, and a part of it that is no text.
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
        _check_content(message.get("content"), f"messages[{i}].content")


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
    """Copies of checked messages, as a template gets them.

    Entries that are None are left out, since APIs write `content: null` where they mean none, and templates would print
    it. Reasoning stands under each of the names that templates read.

    Args:
        takes_parts: the template loops over the parts of a content; else they are joined.
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
        field: which of its entries is continued.
        source: the template.
    Returns: the text that is continued.
    Raises: ValueError if there is none, or the template does not read the field.
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

    Raises: ValueError if the template did not write that message whole.
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
