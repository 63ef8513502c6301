"""The native templates as Jinja sources, which other libraries read from a folder.

Each renders the same text as the function of its name in `trainkit.text.chat.templates`, for
messages whose contents are texts, and rejects the same tools, calls and roles.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainkit.text.chat.templates import (
    LLAMA3_TOOLS_IN_SYSTEM,
    LLAMA3_TOOLS_IN_USER,
    QWEN3_AFTER_TOOLS,
    QWEN3_BEFORE_TOOLS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

# `raise_exception` is the way in which a template of `transformers` rejects messages.
_CHATML = r"""{%- if tools %}
    {{- raise_exception('ChatML has no place for tools') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('ChatML has no place for tool_calls') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Namespaces, because a variable that is set in a loop of Jinja ends with the iteration.
_QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- BEFORE_TOOLS }}
    {%- for tool in tools %}
        {{- '\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- AFTER_TOOLS }}
{%- endif %}
{%- set query = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set is_response = content is string and content.startswith('<tool_response>')
        and content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_response %}
        {%- set query.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer = namespace(content=message.content or '', thoughts='') %}
        {%- if message.reasoning_content is string %}
            {%- set answer.thoughts = message.reasoning_content %}
        {%- elif '</think>' in answer.content %}
            {%- set before = answer.content.split('</think>')[0].rstrip('\n') %}
            {%- set answer.thoughts = before.split('<think>')[-1].lstrip('\n') %}
            {%- set answer.content = answer.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > query.last and (loop.last or answer.thoughts) %}
            {{- '<think>\n' + answer.thoughts.strip('\n') + '\n</think>\n\n' }}
            {{- answer.content.lstrip('\n') }}
        {%- else %}
            {{- answer.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\n' if answer.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {%- set arguments = function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('Qwen 3 does not know the role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# `tools` may be undefined, None or an empty list; the last has a prompt without schemas.
_LLAMA3 = r"""{%- set first = 1 if messages[0].role == 'system' else 0 %}
{%- set has_tools = tools is defined and tools is not none %}
{%- set in_user = has_tools and (tools_in_user_message is not defined or tools_in_user_message) %}
{%- set schemas = namespace(text='') %}
{%- for tool in tools or [] %}
    {%- set schemas.text = schemas.text + (tool | tojson(indent=4)) + '\n\n' %}
{%- endfor %}
{%- if in_user and (messages[first] is not defined or messages[first].role != 'user') %}
    {{- raise_exception('the tools stand in the first turn of the user, which is missing') }}
{%- endif %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if has_tools %}
    {{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' }}
{{- (date_string if date_string is defined else '26 Jul 2024') + '\n\n' }}
{%- if has_tools and not in_user %}
    {{- IN_SYSTEM + schemas.text }}
{%- endif %}
{%- if first %}
    {{- messages[0].content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages[first:] %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if loop.first and in_user %}
        {{- IN_USER + schemas.text }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- message.content | tojson }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('Llama 3 makes one call at a time') }}
        {%- endif %}
        {%- set function = message.tool_calls[0].function or message.tool_calls[0] %}
        {{- '{"name": "' + function.name + '", "parameters": ' }}
        {{- function.arguments | tojson }}
        {{- '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


def _insert_texts(source: str, **texts: str) -> str:
    """Replace names in a source by texts, as string literals of Jinja."""
    # JSON's literals are Jinja's too, with quotes and line ends escaped.
    for name, text in texts.items():
        source = source.replace(name, json.dumps(text))
    return source


JINJA_SOURCES: Mapping[str, str] = {
    "chatml": _CHATML,
    "llama3": _insert_texts(
        _LLAMA3, IN_SYSTEM=LLAMA3_TOOLS_IN_SYSTEM, IN_USER=LLAMA3_TOOLS_IN_USER
    ),
    "qwen3": _insert_texts(_QWEN3, BEFORE_TOOLS=QWEN3_BEFORE_TOOLS, AFTER_TOOLS=QWEN3_AFTER_TOOLS),
}
"""The Jinja of each of `TEMPLATES`, for `chat_template.jinja`.

They also read `date_string` and `tools_in_user_message` (llama3), and `enable_thinking` (qwen3).
"""
