"""Chats and templates that are rendered by transformers (scripts/golden/make_chats.py) and by us, byte for byte.

The templates are written as those of known models are, and none is a copy: `qwen3` with reasoning and tools, `llama31`
with tools in the first user's message, `mistral` with alternating roles, `chatml` trimming nothing, `parts` looping
over the parts of a content, `macro` doing so in a macro.
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
TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama31": LLAMA31, "mistral": MISTRAL, "parts": PARTS, "macro": MACRO}

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
    "assistant_first": ([{"role": "assistant", "content": "x"}], {}),
    "strange_role": ([USER, {"role": "critic", "content": "x"}], {"add_generation_prompt": True}),
}

TAKES_PARTS = ("parts", "macro")
"""Templates that are given parts as they are; the others get them joined, where transformers gives lists."""
