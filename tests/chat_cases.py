"""Chats and templates that are rendered by transformers (scripts/golden/make_chats.py) and by us, byte for byte.

The templates are written as those of known models are, and none is a copy: `qwen3` with reasoning and tools, `llama31`
with tools in the first user's message, `mistral` with alternating roles, `chatml` trimming nothing, `parts` looping
over the parts of a content, `macro` doing so in a macro, `gemma` without a system turn, `harmony` with channels and
types of tools as gpt-oss has them, `glm` with a prefix and reasoning that is dropped, `deepseek` with its state in a
namespace.
"""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nFunctions are described within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer a call as\\n<tool_call>\\n{\\"name\\": <name>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not
        message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_SYSTEM = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
"""
"""How templates of Llama 3 take the message of the system, if there is one."""
LLAMA31 = (
    """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
"""
    + LLAMA_SYSTEM
    + """\
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Respond with a call of one of these:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length == 0 %}{{- raise_exception("no first user message") }}{%- endif %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with a call of one of these:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["user", "assistant", "tool"] %}
        {{- raise_exception("only user, assistant and tool; got " + message["role"]) }}
    {%- elif message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- {"name": tool_call.function.name, "arguments": tool_call.function.arguments} | tojson }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + message["content"]|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
PARTS = """\
{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{% for part in message['content'] %}
{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}
{% endfor %}
{% endif %}</{{ message['role'] }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}
"""
MACRO = """\
{%- macro text_of(body) -%}
    {%- if body is string -%}{{ body }}{%- else -%}
        {%- for item in body -%}{{ item.text }}{{ "|" if not loop.last }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(n=0) -%}
{%- for message in messages -%}
    {%- set ns.n = ns.n + 1 -%}
    {{ ns.n }} {{ message.role }}: {{ text_of(message.content) }} {{ dict(a=1)|tojson }}
{% endfor -%}
{{ mask_token is defined }} {{ image_token }} {{ additional_special_tokens is defined }}
"""
GEMMA = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if message.role not in ('user', 'assistant') -%}
        {{- raise_exception('a turn is of the user or of the assistant, not of ' ~ message.role) -}}
    {%- elif loop.first and message.role == 'assistant' or loop.previtem and loop.previtem.role == message.role -%}
        {{- raise_exception('turns must alternate') -}}
    {%- endif -%}
    <start_of_turn>{{ {'user': 'user', 'assistant': 'model'}[message.role] }}
{{ message.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
    <start_of_turn>model
{% endif -%}
"""
HARMONY = """\
{%- macro type_of(spec) -%}
    {%- if spec.enum -%}
        {%- for value in spec.enum -%}{{ value | tojson }}{{ ' | ' if not loop.last }}{%- endfor -%}
    {%- elif spec.type is string -%}
        {%- if spec.type == 'array' -%}{{ type_of(spec['items']) }}[]
        {%- elif spec.type == 'object' -%}{{ fields_of(spec, '') }}
        {%- else -%}{{ {'integer': 'number'}.get(spec.type, spec.type) }}{%- endif -%}
    {%- elif spec.type is iterable and spec.type is not mapping -%}{{ spec.type | join(' | ') }}
    {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- macro fields_of(spec, indent) -%}
    {{- '{' }}
    {%- for name, field in (spec.properties or {}) | items -%}
        {{- '\\n' + indent }}{% if field.description %}{{ '// ' ~ field.description }} {% endif -%}
        {{- name ~ ('' if name in (spec.required or []) else '?') ~ ': ' ~ type_of(field) }}
        {%- if field.default is defined -%}{{ ' = %s' % (field.default | tojson) }}{%- endif -%}
    {%- endfor -%}
    {{- '}' }}
{%- endmacro -%}
{%- if reasoning_effort is not defined -%}{%- set reasoning_effort = 'medium' -%}{%- endif -%}
{%- set analysis_of = 'thinking' -%}
<|start|>system<|message|>{{ model_identity | default('You chat.') }}
Reasoning: {{ reasoning_effort }}
{%- for name in builtin_tools or [] | sort %}
Tool: {{ name | capitalize | replace('o', '0', 1) }}{% endfor -%}
<|end|>
{%- if messages[0].role in ['system', 'developer'] -%}
    {%- set instructions = messages[0].content -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set instructions = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- if instructions or tools -%}
    {{- '<|start|>developer<|message|>' + instructions }}
    {%- for tool in tools or [] -%}
        {%- set function = tool.function or tool -%}
        {{- '\\ntype ' ~ function.name ~ ' = (_: ' ~ fields_of(function.parameters or {}, '  ') ~ ') => any;' }}
    {%- endfor -%}
    {{- '<|end|>' }}
{%- endif -%}
{%- set last = namespace(user=-1, call=none) -%}
{%- for message in turns if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endfor -%}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}
        {%- if message[analysis_of] and (message.tool_calls or loop.last) -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- if loop.index > 1 -%}{{- raise_exception('one call in a turn') }}{%- endif -%}
            {%- set last.call = call.function.name -%}
            {{- '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' }}
            {{- call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) }}<|call|>
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endfor -%}
    {%- elif message.role == 'tool' -%}
        {%- if not last.call -%}{{- raise_exception('a result without a call') }}{%- endif -%}
        {{- '<|start|>functions.' ~ last.call ~ ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson(ensure_ascii=true) ~ '<|end|>' }}
    {%- else -%}
        {{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
GLM = """\
[gMASK]<sop>
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part is mapping and part.type == 'text' -%}{{ part.text }}{%- elif part is string -%}{{ part }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- macro tagged(name) -%}<{{ name }}>{{ caller() }}</{{ name }}>{%- endmacro -%}
{%- if tools -%}
    <|system|>
    {%- call tagged('tools') -%}
        {%- for tool in tools -%}{{ '\\n' ~ tool | tojson(indent=1) }}{%- endfor -%}
    {%- endcall -%}
{%- endif -%}
{%- set ns = namespace({'last_user': -1}, shown=0) -%}
{%- for message in messages | reverse -%}
    {%- if message.role != 'user' -%}{%- continue -%}{%- endif -%}
    {%- set ns.last_user = messages | length - loop.index -%}
    {%- break -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        <|user|>
{{ visible(message.content) }}
        {{- '/nothink' if enable_thinking is defined and not enable_thinking and not
            visible(message.content).endswith('/nothink') else '' -}}
    {%- elif message.role == 'assistant' -%}
        <|assistant|>
        {%- set content, reasoning = visible(message.content), message.reasoning_content or '' -%}
        {%- if not reasoning and '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- generation -%}
        {%- if reasoning and (loop.index0 > ns.last_user or clear_thinking is defined and not clear_thinking) -%}
            {%- set ns.shown = ns.shown + 1 -%}
            {{- '\\n<think>' ~ reasoning.strip() ~ '</think>' -}}
        {%- else -%}
            {{- '\\n<think></think>' -}}
        {%- endif -%}
        {{- '\\n' ~ content.strip() if content.strip() -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function else call -%}
            {{- '\\n<tool_call>' ~ call.name -}}
            {%- for key, value in call.arguments.items() -%}
                {%- set shown %}{{ value if value is string else value | tojson }}{% endset -%}
                {{- '\\n<arg_key>%s</arg_key><arg_value>%s</arg_value>' | format(key, shown) -}}
            {%- endfor -%}
            {{- '\\n</tool_call>' -}}
        {%- endfor -%}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' -}}
        {%- call tagged('tool_response') -%}{{ visible(message.content) }}{%- endcall -%}
    {%- else -%}
        <|{{ message.role }}|>
{% filter trim %} {{ visible(message.content) }} {% endfilter %}
    {%- endif -%}
{%- endfor -%}
{{- ' ' ~ ns.shown -}}
{%- if add_generation_prompt -%}
    <|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif -%}
"""
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, in_results=false, system='', is_first_system=true) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('' if ns.is_first_system else '\\n\\n') + message['content'] %}
    {%- set ns.is_first_system = false %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.in_results = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] %}
        {%- set ns.in_results = false %}
        {%- for call in message['tool_calls'] %}
            {{- '<｜Assistant｜><｜calls｜>' + (message['content'] or '') if loop.first else '' }}
            {{- '<｜call｜>' + call['type'] + '<｜sep｜>' + call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] if call['function']['arguments'] is string else
                call['function']['arguments'] | tojson }}
            {{- '\\n```<｜/call｜>' }}
        {%- endfor %}
        {{- '<｜/calls｜>' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- ('<｜/results｜>' if ns.in_results else '<｜Assistant｜>') + content + eos_token }}
        {%- set ns.in_results = false %}
    {%- elif message['role'] == 'tool' %}
        {{- ('\\n' if ns.in_results else '<｜results｜>') + '<｜result｜>' + message['content'] + '<｜/result｜>' }}
        {%- set ns.in_results = true %}
    {%- endif %}
{%- endfor -%}
{% if ns.in_results %}{{ '<｜/results｜>' }}{% endif %}
{% if add_generation_prompt and not ns.in_results %}
{{ '<｜Assistant｜>' + ('<think>\\n' if thinking else '</think>') }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama31": LLAMA31, "mistral": MISTRAL, "parts": PARTS, "macro": MACRO}
TEMPLATES |= {"gemma": GEMMA, "harmony": HARMONY, "glm": GLM, "deepseek": DEEPSEEK}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, with “quotes” & <tags>.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Zeit — 時間", "parameters": {}}},
]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 1.5}}}
SYSTEM = {"role": "system", "content": " Be brief.\nAlways. "}
USER = {"role": "user", "content": " 1+1? <b>é猫</b> "}
TURN = [USER, {"role": "assistant", "content": "It is 2.\n"}]
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "☁"}'},
]
THOUGHT = [USER, {"role": "assistant", "reasoning": "one and one", "content": "2"}, {"role": "user", "content": "Why?"}]
NESTED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book_trip",
            "description": "Books.\nSeveral\tlines; “naïve” 'quotes' \"too\".",
            "strict": True,
            "parameters": {
                "$defs": {"leg": {"type": "object", "properties": {"to": {"type": "string"}}}},
                "type": "object",
                "properties": {
                    "legs": {
                        "type": "array",
                        "description": "In order.",
                        "items": {
                            "type": "object",
                            "properties": {
                                "from": {"type": "string", "enum": ["Zürich", "東京"], "description": "A city."},
                                "at": {"type": ["string", "null"], "format": "date-time", "default": None},
                                "chairs": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                            },
                            "required": ["from"],
                        },
                    },
                    "class": {"type": "string", "enum": ["first", "second"], "default": "second"},
                    "budget": {"anyOf": [{"type": "number"}, {"type": "null"}], "description": "In €.", "default": 1e3},
                    "extras": {"type": "object", "additionalProperties": {"type": "boolean"}},
                    "leg": {"$ref": "#/$defs/leg"},
                },
                "required": ["legs", "class"],
                "additionalProperties": False,
            },
            "return": {"type": "string", "description": "A booking."},
        },
    },
    TOOLS[0],
    {
        "type": "function",
        "function": {
            "name": "ping",
            "description": "Answers pong.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]
"""Tools with nested schemas, a default that is null, and no parameters."""
SIMPLE_TOOLS = NESTED_TOOLS[1:]
BARE_TOOL = {"type": "function", "function": {"name": "ping", "description": "Answers pong."}}
FLAT_TOOL = {
    "name": "search",
    "description": "Searches — all.",
    "parameter_definitions": {
        "query": {"description": "Words.", "type": "str", "required": True},
        "max_results": {"description": "At most.", "type": "int", "required": False},
    },
}
"""A tool as Cohere's first templates take it."""
ARGUMENTS = {"legs": [{"from": "東京", "at": None, "chairs": [1, 2]}], "class": "first", "budget": 1.5e21, "ok": True}
CALLS = [
    {"id": "bookTrip1", "type": "function", "function": {"name": "book_trip", "arguments": ARGUMENTS}},
    {"id": "pingPong2", "type": "function", "function": {"name": "ping", "arguments": {}}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "bookTrip1", "name": "book_trip", "content": '{"booking": "Ä-1", "ok": true}'},
    {"role": "tool", "tool_call_id": "pingPong2", "name": "ping", "content": "pong\n"},
]
CALLED_TWICE = [
    {"role": "system", "content": "You book trips."},
    {"role": "user", "content": "To 東京, and ping."},
    {"role": "assistant", "content": "Both at once.", "reasoning_content": "Two calls.\n", "tool_calls": CALLS},
    *RESULTS,
    {"role": "assistant", "content": "Booked, and pong.", "reasoning_content": "Both answered."},
    {"role": "user", "content": "Thanks"},
]
REPEATED_CALLS = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "First one.",
        "tool_calls": [{**CALL, "id": "abcdefghi"}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "rain"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Once more.",
        "tool_calls": [{**CALL, "id": "jklmnopqr"}],
    },
    {"role": "tool", "tool_call_id": "jklmnopqr", "name": "get_weather", "content": "sun"},
]
TEXT_CALL = {"id": "123456789", "type": "function", "function": {"name": "ping", "arguments": '{"a": "ü"}'}}
DOCUMENTS = [
    {"doc_id": 1, "title": "Tall penguins", "text": "Emperor penguins — the tallest."},
    {"doc_id": "b", "title": "Where", "text": "Only in Antarctica.", "snippet": "ice", "timestamp": 2.0},
]
THOUGHTS = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo"},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "reasoning_content": "Two and one", "content": "Three"},
    {"role": "user", "content": "Sure? /no_think"},
    {"role": "assistant", "thinking": "Yes", "content": "Sure."},
]
"""Reasoning within the content and under two names."""
TEXT = {"type": "text", "text": "What is"}
MORE = {"type": "text", "text": " this? "}
FINAL = {"role": "assistant", "content": "The answer  "}

CHATS = {
    "user": ([USER], {}),
    "prompt": ([USER], {"add_generation_prompt": True}),
    "system": ([SYSTEM, USER], {"add_generation_prompt": True}),
    "turns": ([SYSTEM, *TURN, USER], {"add_generation_prompt": True}),
    "answered": (TURN, {}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS, "add_generation_prompt": True}),
    "no_tools": ([USER], {"tools": []}),
    "called": (CALLED, {"tools": TOOLS, "add_generation_prompt": True}),
    "called_alone": (CALLED, {}),
    "null_content": ([USER, {"role": "assistant", "content": None}, USER], {}),
    "no_content": ([USER, {"role": "assistant"}, USER], {}),
    "extra_keys": ([{**USER, "name": None, "tool_calls": None}], {}),
    "thinking_off": ([USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "thinking_on": ([USER], {"add_generation_prompt": True, "enable_thinking": True}),
    "thoughts": (THOUGHT, {"add_generation_prompt": True}),
    "thought_last": (THOUGHT[:2], {}),
    "variables": ([USER], {"tools": TOOLS, "date_string": "1 May 2026", "tools_in_user_message": False}),
    "bos_replaced": ([USER], {"bos_token": "<other>"}),
    "documents": ([USER], {"documents": [{"title": "a", "text": "b"}]}),
    "continue": ([*TURN[:1], FINAL], {"continue_final_message": True}),
    "continue_user": ([USER], {"continue_final_message": True}),
    "continue_thought": (THOUGHT[:2], {"continue_final_message": "reasoning_content"}),
    "continue_thinking": (THOUGHT[:2], {"continue_final_message": "thinking"}),
    "continue_nothing": ([USER, {"role": "assistant", "content": None}], {"continue_final_message": True}),
    "continue_call": (CALLED[:2], {"continue_final_message": True}),
    "continue_field": ([*TURN[:1], FINAL], {"continue_final_message": "nowhere"}),
    "continue_empty": ([USER, {"role": "assistant", "content": ""}], {"continue_final_message": True}),
    "continue_and_prompt": (TURN, {"continue_final_message": True, "add_generation_prompt": True}),
    "parts": ([SYSTEM, {"role": "user", "content": [TEXT, MORE]}], {"add_generation_prompt": True}),
    "part": ([{"role": "user", "content": [TEXT]}], {}),
    "continue_parts": ([USER, {"role": "assistant", "content": [TEXT, MORE]}], {"continue_final_message": True}),
    "nested_tools": ([USER], {"tools": NESTED_TOOLS, "add_generation_prompt": True}),
    "bare_tool": ([USER], {"tools": [BARE_TOOL], "add_generation_prompt": True}),
    "flat_tools": ([SYSTEM, USER], {"tools": [FLAT_TOOL, FLAT_TOOL], "add_generation_prompt": True}),
    "two_calls": (CALLED_TWICE[:5], {"tools": NESTED_TOOLS, "add_generation_prompt": True}),
    "two_calls_only": (CALLED_TWICE[:3], {"tools": SIMPLE_TOOLS}),
    "two_calls_answered": (CALLED_TWICE, {"tools": SIMPLE_TOOLS, "add_generation_prompt": True}),
    "repeated_calls": (REPEATED_CALLS, {"tools": SIMPLE_TOOLS, "add_generation_prompt": True}),
    "repeated_calls_thinking": (
        REPEATED_CALLS,
        {"tools": SIMPLE_TOOLS, "add_generation_prompt": True, "enable_thinking": True, "thinking": True},
    ),
    "text_arguments": (
        [USER, {"role": "assistant", "tool_calls": [TEXT_CALL]}, {"role": "tool", "content": "1"}],
        {"tools": SIMPLE_TOOLS, "add_generation_prompt": True},
    ),
    "continue_after_calls": ([*CALLED_TWICE[:5], FINAL], {"tools": SIMPLE_TOOLS, "continue_final_message": True}),
    "all_thoughts": (THOUGHTS, {}),
    "thoughts_off": (THOUGHTS[:-1], {"add_generation_prompt": True, "enable_thinking": False, "thinking": False}),
    "thoughts_on": (THOUGHTS[:-1], {"add_generation_prompt": True, "enable_thinking": True, "thinking": True}),
    "thoughts_kept": (
        THOUGHTS[:-1],
        {"add_generation_prompt": True, "preserve_thinking": True, "clear_thinking": False, "keep_all_reasoning": True},
    ),
    "effort": ([SYSTEM, USER], {"add_generation_prompt": True, "reasoning_effort": "high", "thinking_budget": 512}),
    "built_in_tools": (
        [SYSTEM, USER],
        {
            "tools": SIMPLE_TOOLS,
            "add_generation_prompt": True,
            "builtin_tools": ["browser", "python"],
            "model_identity": "I.",
        },
    ),
    "other_tools": (
        [SYSTEM, USER],
        {"add_generation_prompt": True, "xml_tools": NESTED_TOOLS, "python_tools": [], "custom_tools": TOOLS},
    ),
    "grounded": (
        [SYSTEM, USER],
        {"documents": DOCUMENTS, "add_generation_prompt": True, "citation_mode": "accurate", "controls": {"length": 3}},
    ),
    "grounded_tools": ([USER], {"documents": DOCUMENTS, "tools": SIMPLE_TOOLS, "add_generation_prompt": True}),
    "developer": ([{"role": "developer", "content": "Speak ünïcode."}, USER], {"add_generation_prompt": True}),
    "system_developer": (
        [SYSTEM, {"role": "developer", "content": "Rhyme."}, USER],
        {"tools": TOOLS, "add_generation_prompt": True},
    ),
    "system_later": ([USER, SYSTEM, USER], {"add_generation_prompt": True}),
    "system_only": ([SYSTEM], {"add_generation_prompt": True}),
    "no_think": ([{"role": "system", "content": "Terse. /no_think"}, USER], {"add_generation_prompt": True}),
    "users_in_a_row": ([USER, {"role": "user", "content": "x"}, TURN[1], TURN[1]], {"add_generation_prompt": True}),
    "long": ([SYSTEM, *TURN * 6, USER], {"add_generation_prompt": True}),
    "empty": ([{"role": "user", "content": ""}, {"role": "assistant", "content": " \n"}], {}),
    "marks": (
        [{"role": "user", "content": "{{ x }} {% y %} <|im_end|></s><think>\u2028\u00a0\x07\r\n👩‍👩‍👧 e\u0301"}],
        {"add_generation_prompt": True},
    ),
    "result_parts": ([*REPEATED_CALLS[:2], {"role": "tool", "content": [TEXT, MORE]}], {"tools": SIMPLE_TOOLS}),
    "assistant_first": ([{"role": "assistant", "content": "x"}], {}),
    "strange_role": ([USER, {"role": "critic", "content": "x"}], {"add_generation_prompt": True}),
}

TAKES_PARTS = ("parts", "macro", "glm")
"""Templates that are given parts as they are; the others get them joined, where transformers gives lists."""
