"""The settings of a chat, which say how its messages become text: their names, and which values they may have.

Configurations, rows, requests and the tokenizer all ask here.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

CHAT_KEYS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""How a chat is rendered: of all chats of a run, of a row, and of a request."""
_RESERVED = {
    **dict.fromkeys(
        ("messages", "tools", "add_generation_prompt", "continue_final_message"),
        "is a parameter of its own; give it beside chat_template_kwargs",
    ),
    **dict.fromkeys(("chat_template", "conversation"), "cannot be replaced; the template is the model's own"),
    **dict.fromkeys(
        ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        "is no variable of a template; the text is returned, to be encoded afterwards",
    ),
}
"""Names that are none of a template's variables, and why."""


def check_chat_settings(given: Mapping[str, Any], path: str = "") -> None:
    """Check values of `CHAT_KEYS`. Raises: ValueError for one of the wrong type, or two that exclude each other.

    Args:
        path: what stands before the keys, for messages.
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
    """Raises: ValueError if a chat is to end in two ways."""
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            f"{path}add_generation_prompt and {path}continue_final_message are both true; a chat either continues its "
            "last message or begins another: to continue it, set add_generation_prompt=False"
        )


def check_template_kwargs(kwargs: Any, path: str = "") -> None:
    """Check variables that a caller adds to those of a chat template.

    Raises: ValueError naming one that is not a name, or stands for something else already.
    """
    where = f"{path}chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"{where} is {type(kwargs).__name__}; expected a mapping of names to values")
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{where} has the key {reprlib.repr(name)}; expected the name of a template's variable")
        if name in _RESERVED:
            raise ValueError(f"{where}: {name!r} {_RESERVED[name]}")
