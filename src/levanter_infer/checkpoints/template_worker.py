"""The process in which a chat template runs: jinja2's sandbox inside limits that the operating system enforces.

Run as a script by `chat_template.ChatTemplate` and not imported by it: standard library and jinja2 only. A template is
part of a download. The sandbox keeps it away from Python's internals but not from time and memory: operators, filters,
string methods, concatenation and loops can each take any amount of either, and jinja2 evaluates constant
expressions while it compiles. So the process limits its own address space and processor time before it sees the
template; the bounds on operators only make the common cases cheap and their messages clear.

Protocol: one JSON object a line. First `{"path", "template", "limits"}`, answered with `{"reads", "takes_parts"}`: the
variables that the template reads, and whether it loops over the parts of a message's content. Then any number of
`{"variables"}`, each answered with `{"text"}`. Every answer may instead be `{"kind", "error"}`.
"""

import json
import os
import re
import signal
import sys
from datetime import datetime

MAX_SEQUENCE = 1_000_000
"""Largest number of characters or items in the result of an operator other than `+`."""
MAX_SUM = 8_000_000
"""Largest number of characters or items in the result of `+`, by which templates put marks around long contents."""
MAX_INT_BITS = 4096
"""Largest number of bits in the integer result of an operator."""
MAX_FORMAT_WIDTH = 1000
"""Largest width or precision in a `%` format."""
MAX_RANGE = 100_000


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    limits = setup["limits"]
    import jinja2

    limit_process(limits["memory_bytes"])
    template, answer = guarded(jinja2, limits["cpu_s"], lambda: compiled(setup["template"]))
    send(answers, answer)
    while template is not None and (line := sys.stdin.readline()):
        _, answer = guarded(jinja2, limits["cpu_s"], lambda line=line: answered(template, line, limits))
        send(answers, answer)
        if answer.get("kind") == "memory":
            return


def guarded(jinja2, cpu_s: float, function):
    """`function()`, or None and the error as an answer; after `cpu_s` of processor time the process dies."""
    limit_time(cpu_s)
    try:
        return function()
    except MemoryError:
        error, kind = "it needs too much memory", "memory"
    except RecursionError:
        error, kind = "it nests too deeply", "template"
    except RefusedMessages as e:
        error, kind = str(e), "refused"
    except jinja2.TemplateSyntaxError as e:
        error, kind = f"line {e.lineno}: {e.message}", "syntax"
    except Exception as e:
        error, kind = f"{type(e).__name__}: {e}", "template"
    finally:
        limit_time(0)
    return None, {"kind": kind, "error": error[:500]}


def answered(template, line: str, limits: dict):
    """None, and the answer to one line; each message adds to the processor time that the rendering may take."""
    variables = json.loads(line)["variables"]
    limit_time(limits["cpu_s"] + limits["message_cpu_s"] * len(variables["messages"]))
    return None, {"text": render(template, variables, limits["max_chars"])}


def send(answers, answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def limit_process(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system; the parent's deadline remains
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def limit_time(cpu_s: float) -> None:
    """Die of SIGPROF after `cpu_s` more seconds of processor time, whatever the interpreter is doing; 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # libtpu ignores it, and a child inherits that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


class RefusedMessages(Exception):
    """The template called `raise_exception`."""


def compiled(source: str):
    """The compiled template, and the answer that describes it."""
    import jinja2.meta

    environment = make_environment()
    tree = environment.parse(source)
    reads = sorted(jinja2.meta.find_undeclared_variables(tree))
    return environment.from_string(source), {"reads": reads, "takes_parts": takes_parts(tree)}


def takes_parts(tree) -> bool:
    """Whether a template loops over a message's `content`, under this or another name: it then expects a list of parts.

    Source: the rule by which vLLM detects a template's content format.
    """
    import jinja2.nodes as nodes

    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names = {"content"}

    def stands_for_content(node) -> bool:
        if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            return stands_for_content(node.node)
        if isinstance(node, nodes.CondExpr):
            return stands_for_content(node.expr1) or stands_for_content(node.expr2)
        if isinstance(node, nodes.Or):
            return stands_for_content(node.left)
        if isinstance(node, nodes.Name):
            return node.name in names
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    grown = -1
    while grown != len(names):  # until no alias of an alias is left
        grown = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and stands_for_content(assign.node):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for parameter, argument in zip(macro.args if macro else (), call.args, strict=False):
                if stands_for_content(argument):
                    names.add(parameter.name)
    return any(stands_for_content(loop.iter) for loop in tree.find_all(nodes.For))


def render(template, variables: dict, max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"its output exceeds {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def make_environment():
    """jinja2 with the options, filters and globals of transformers' chat templates, and with bounded operators."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def call_binop(self, context, operator, left, right):
            check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; it is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

        def _render(self, caller):
            return caller()

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["range"] = bounded_range
    environment.globals["dict"] = dict_class()
    environment.globals["namespace"] = namespace_class(jinja2)
    return environment


def dict_class():
    """`dict` without the attributes of a class."""

    class TemplateDict:
        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    return TemplateDict()


def namespace_class(jinja2):
    """jinja2's namespace, which refuses names with a leading underscore."""

    def check_name(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace has no attribute {name!r}: it begins with an underscore"
            )

    class TemplateNamespace(jinja2.utils.Namespace):
        def __init__(*args, **kwargs):  # no `self`: it may be the name of an attribute
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                check_name(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name, value):
            check_name(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    return TemplateNamespace


def raise_exception(message):
    raise RefusedMessages(str(message))


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """transformers' filter; jinja2's own escapes HTML characters."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def bounded_range(*args):
    result = range(*args)
    if len(result) > MAX_RANGE:
        raise ValueError(f"range of {len(result)} items; at most {MAX_RANGE} are allowed")
    return result


def check_operands(operator: str, left, right) -> None:
    """Raise ValueError if `left operator right` is too large."""
    if operator == "%" and isinstance(left, (str, bytes)):
        text = left if isinstance(left, str) else left.decode("latin-1")
        wide = any(int(n) > MAX_FORMAT_WIDTH for n in re.findall(r"\d+", text)) if len(text) <= MAX_SEQUENCE else True
        if wide or re.search(r"%[^a-zA-Z%]*\*", text):
            raise ValueError(f"'%' format with a width above {MAX_FORMAT_WIDTH} or given by an argument")
    elif operator in ("*", "+"):
        sizes = [len(x) if hasattr(x, "__len__") else None for x in (left, right)]
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INT_BITS:
                raise ValueError(f"'{operator}' of integers beyond {MAX_INT_BITS} bits")
        elif operator == "+":
            if None not in sizes and sum(filter(None, sizes)) > MAX_SUM:
                raise ValueError(f"'+' gives more than {MAX_SUM} items")
        else:
            repeats = [x for x in (left, right) if isinstance(x, int)]
            size = next((s for s in sizes if s is not None), 0)
            if repeats and size * repeats[0] > MAX_SEQUENCE:
                raise ValueError(f"'*' gives more than {MAX_SEQUENCE} items")
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if right > MAX_INT_BITS or left.bit_length() * right > MAX_INT_BITS:
            raise ValueError(f"'**' gives an integer beyond {MAX_INT_BITS} bits")


if __name__ == "__main__":
    main()
