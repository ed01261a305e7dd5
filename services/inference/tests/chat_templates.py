"""Chat templates as models have them, shortened to what decides: thinking, tools, the ends of turns."""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a json object within <tool_call></tool_call> XML tags<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Opens the thinking itself, and drops it from earlier turns.
THINKER = """\
{%- for m in messages %}
    {%- set content = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

HERMES = """\
{{- '<|im_start|>system\\n' }}
{%- if tools %}{{- 'Tools: <tools>' + (tools | tojson) + '</tools> Answer with <tool_call>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for c in m.tool_calls %}
            {%- set call = {'name': c.function.name, 'arguments': c.function.arguments} %}
            {{- '\\n<tool_call>\\n' + (call | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Tools in the first user message, answers of tools as "ipython", one call at a time, a date before all.
LLAMA3 = """\
{{- '<|endoftext|>' }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|im_start|>system\\n\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|im_end|>' }}
{%- if tools %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|im_start|>user\\n\\nRespond with {"name": function name, "parameters": dictionary}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n\\n' + message.content | trim + '<|im_end|>' }}
    {%- elif message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>ipython\\n\\n' + (message.content | tojson) + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"""

# Alternating turns, ids of nine letters, tools before the last user message only: earlier turns change.
MISTRAL = """\
{%- set ns = namespace(index=0) %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- '<|endoftext|>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']<|im_end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content + '<|im_end|>' }}
    {%- else %}
        {%- if m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# Puts the last system message before all turns, wherever it stood, as DeepSeek's do.
HOISTS = """\
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{%- set ns.system = m.content %}{%- endfor %}
{{- ns.system }}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Gemma-like: answers of tools continue the model's own turn, whose end is then missing.
CONTINUES_THE_TURN = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>model\\n' + m.content }}
        {%- for c in m.tool_calls or [] %}
            {{- '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}
        {%- endfor %}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif m.role == 'tool' %}{{- '<answer>' + m.content + '</answer>' }}
    {%- else %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|im_start|>model\\n' }}{%- endif %}"""

# As a variable says: what stands behind each question, and whether an answer begins by thinking.
VARIES = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {{- ' /' + style if style and m.role == 'user' else '' }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '' }}
{%- endif %}"""
# Continues the turn only where a variable says so.
MAY_CONTINUE = CONTINUES_THE_TURN.replace("loop.last or", "not continues or loop.last or").replace(
    "messages[-1].role != 'tool' %}", "(not continues or messages[-1].role != 'tool') %}"
)
