"""Chat templates of published models against HF transformers: every `*.jinja` of a folder, every chat of the tests.

    python -m venv .venv-tok && .venv-tok/bin/pip install -r scripts/golden/requirements-tokenizers.txt
    .venv-tok/bin/python scripts/peers/chat_templates.py answer FOLDER answers.json
    .venv/bin/python scripts/peers/chat_templates.py compare FOLDER answers.json

`answer` writes what transformers renders, or that it refuses; `compare` renders the same here, prints a line per
template and exits with 1 if any chat differs. Both clocks stand at the same moment. Packages of the Python index bring
templates: trl (`trl/chat_templates/` of its wheel), llama-cpp-python and vllm (`models/templates/` and `examples/` of
their source archives).

Contents in parts that a template does not loop over are joined here, and transformers gets them joined too
(docs/loading.md, "Chats").
"""

import copy
import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.chat_cases import CHATS
from tests.tokenizer_files import byte_level, write

NOW = datetime(2026, 5, 1, 13, 7, 9)
TOKENS = {name: f"<|{name}|>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}


def with_joined_parts(messages: list[dict]) -> list[dict]:
    """The messages with a text in place of parts of text."""
    joined = copy.deepcopy(messages)
    for message in joined:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    return joined


def has_parts(messages: list[dict]) -> bool:
    return messages != with_joined_parts(messages)


def rendered(apply, messages: list[dict], arguments: dict) -> str | None:
    """The text of a chat; None if it is refused."""
    try:
        return apply(copy.deepcopy(messages), **{"add_generation_prompt": False, **copy.deepcopy(arguments)})
    except Exception:
        return None


def answer(folder: Path, answers: Path) -> None:
    """Write transformers' texts by template and chat: of the messages, and of the messages with joined parts."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    chat_template_utils.datetime = Clock
    found: dict = {}
    for path in sorted(folder.glob("*.jinja")):
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), byte_level(), tokenizer_config=CONFIG)
            (Path(directory) / "chat_template.jinja").write_bytes(path.read_bytes())
            tokenizer = AutoTokenizer.from_pretrained(directory)

        def apply(messages, tokenizer=tokenizer, **arguments):
            return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)

        found[path.name] = {
            name: [rendered(apply, given, arguments) for given in (messages, with_joined_parts(messages))]
            for name, (messages, arguments) in CHATS.items()
        }
        print(path.name, sum(both[0] is not None for both in found[path.name].values()), "texts", flush=True)
    answers.write_text(json.dumps(found))


def compare(folder: Path, answers: Path) -> int:
    """Print equal, refused and different chats by template; the exit status."""
    from levanter_infer.checkpoints import chat_template
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    source = chat_template._WORKER.read_text()
    frozen = source.replace("datetime.now()", f"datetime.fromisoformat({NOW.isoformat()!r})")
    assert frozen != source
    expected, total = json.loads(answers.read_text()), {"equal": 0, "both refuse": 0, "differ": 0}
    with tempfile.TemporaryDirectory() as directory:
        chat_template._WORKER = Path(directory) / "worker.py"
        chat_template._WORKER.write_text(frozen)
        files = write(Path(directory) / "model", byte_level(), tokenizer_config=CONFIG)
        for path in sorted(folder.glob("*.jinja")):
            (files / "chat_template.jinja").write_bytes(path.read_bytes())
            tokenizer = Tokenizer.from_directory(files)
            counts, differing = dict.fromkeys(total, 0), []
            for name, (messages, arguments) in CHATS.items():
                ours = rendered(tokenizer.apply_chat_template, messages, arguments)
                as_given, joined = expected[path.name][name]
                takes_parts = tokenizer._template("default")._description.get("takes_parts", True)
                theirs = joined if has_parts(messages) and not takes_parts else as_given
                kind = "differ" if ours != theirs else "equal" if ours is not None else "both refuse"
                counts[kind] += 1
                if kind == "differ":
                    differing.append((name, ours, theirs))
            total = {kind: total[kind] + counts[kind] for kind in total}
            print(path.name, *(f"{kind} {count}" for kind, count in counts.items()), sep="  ", flush=True)
            for name, ours, theirs in differing:
                print(f"    {name}: {difference(ours, theirs)}")
    print(f"{len(expected)} templates, {len(CHATS)} chats:", ", ".join(f"{kind} {n}" for kind, n in total.items()))
    return 1 if total["differ"] else 0


def difference(ours: str | None, theirs: str | None) -> str:
    if ours is None or theirs is None:
        return "refused here only" if ours is None else f"refused by transformers only; here {ours[-60:]!r}"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"at {at}: {ours[max(0, at - 20) : at + 40]!r}, transformers {theirs[max(0, at - 20) : at + 40]!r}"


if __name__ == "__main__":
    command, folder, answers = sys.argv[1:]
    sys.exit({"answer": answer, "compare": compare}[command](Path(folder), Path(answers)))
