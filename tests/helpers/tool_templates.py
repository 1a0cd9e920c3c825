"""Chat templates with tools and thoughts in the ways of well-known families, written for tests.

A family is (template, special tokens with the one that ends a turn first).
"""

QWEN = (
    "{%- set first = messages[0] -%}"
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{{ (first.content if first.role == 'system' else 'Be helpful.') + '\n\n# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{%- elif first.role == 'system' %}"
    "{{ '<|im_start|>system\n' + first.content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if m.reasoning_content and loop.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{- m.content }}{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (  # one call in a message; the result of a tool is JSON, text too
    "{{- '<|begin_of_text|>' }}{% if tools %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge.' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
    "{%- for m in messages %}{% if m.tool_calls %}"
    "{%- if m.tool_calls | length > 1 %}{{ raise_exception('a single call only') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"' + call.name + '\", ' }}"
    "{{- '\"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{- (m.content | tojson) + '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content }}"
    "{{- '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (  # special tokens inside the answer
    "{{- '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{%- if tools and loop.first %}"
    "{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- m.content }}{% for call in m.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}"
    "{%- endfor %}{{ '</s>' }}{% endif %}{% endfor %}"
)
MISTRAL_LIST = (  # as versions 3 to 7: a list of calls, whose ids it demands
    "{%- macro demand(id) %}{% if not id or id | length != 9 %}"
    "{{ raise_exception('ids of calls have 9 letters or digits') }}{% endif %}{% endmacro %}"
    "{%- for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant alternate') }}{% endif %}{% endfor %}"
    "{{- '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{%- if tools and loop.first %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{- demand(call.id) + (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{- ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}"
    "{%- elif m.role == 'tool' %}{{- demand(m.tool_call_id) + '[TOOL_RESULTS] {\"content\": ' }}"
    "{{- m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- m.content + '</s>' }}{% endif %}{% endfor %}"
)
DEEPSEEK = (  # as V3 and R1: what was thought is dropped, calls are blocks of code
    "{{- '<｜begin▁of▁sentence｜>' }}"
    "{%- for tool in tools or [] %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{%- for m in messages %}{% if m.role == 'user' %}"
    "{{- '<｜User｜>' + m.content + '<｜Assistant｜>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '\n' if messages[loop.index0 - 1].role == 'tool' else '<｜tool▁outputs▁begin｜>' }}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{%- else %}{{- m.content.split('</think>')[-1] }}{% for call in m.tool_calls or [] %}"
    "{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}"
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{- (call.function.arguments | tojson) + '\n```<｜tool▁call▁end｜>' }}"
    "{{- '<｜tool▁calls▁end｜>' if loop.last }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{%- endfor %}"
)
DEEPSEEK_PLAIN = (  # as V3.1: arguments are joined to text, results without marks around them all
    DEEPSEEK.replace("function<｜tool▁sep｜>' + call.function.name + '\n```json\n'",
                     "' + call.function.name + '<｜tool▁sep｜>'")
    .replace("'\n```<｜tool▁call▁end｜>'", "'<｜tool▁call▁end｜>'")
    .replace("(call.function.arguments | tojson)", "call.function.arguments")
    .replace("'\n' if messages[loop.index0 - 1].role == 'tool' else", "'' if m else")
    .replace("'<｜tool▁outputs▁end｜>'", "''").replace("if loop.first else '\n'", "if loop.first")
    .replace("<｜Assistant｜>'", "<｜Assistant｜></think>'")
)  # fmt: skip
GPT_OSS = (  # channels; a result names the function of the call before it, which it demands
    "{%- for tool in tools or [] %}{% if loop.first %}"
    "{{ '<|start|>developer<|message|># Tools' }}{% endif %}{{ '\n' + (tool | tojson) }}"
    "{% if loop.last %}{{ '<|end|>' }}{% endif %}{% endfor %}{% set called = namespace(name='') %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}"
    "{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}"
    "{%- set answered = later | rejectattr('tool_calls', 'defined') | list %}"
    "{%- if m.thinking and not answered and (m.tool_calls or loop.last) %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{%- if m.tool_calls %}{% set called.name = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json' }}"
    "{{- '<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}{% else %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}{% set called.name = '' %}{% endif %}"
    "{%- elif m.role == 'tool' %}{% if not called.name %}"
    "{{ raise_exception('a result has no call before it') }}{% endif %}"
    "{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary' }}"
    "{{- '<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
KIMI = (  # the id of a call is all that names it, and heads its result
    "{%- if tools %}"
    "{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_' + (m.role if m.role in ('user', 'assistant') "
    "else 'system') + '|>' + (m.name or m.role) + '<|im_middle|>' }}"
    "{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}"
    "{{- m.content }}{% for call in m.tool_calls or [] %}"
    "{{- '<|tool_calls_section_begin|>' if loop.first }}{{ '<|tool_call_begin|>' + call.id }}"
    "{{- '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) }}"
    "{{- '<|tool_call_end|>' }}{{ '<|tool_calls_section_end|>' if loop.last }}{% endfor %}"
    "{{- '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
PHI = (  # a token behind the whole conversation
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{%- if loop.first and tools %}{{ '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{% endif %}"
    "{%- if m.tool_calls %}{{ '<|tool_call|>' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|/tool_call|>' }}"
    "{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
SMOLLM = QWEN.replace("and loop.last ", "")  # keeps the thoughts of all answers
OLMO = (  # calls as Python
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- if loop.first and tools %}"
    "{{ '<functions>' + (tools | tojson) + '</functions>' }}{% endif %}"
    "{%- if m.tool_calls %}{{ '<function_calls>' }}{% for call in m.tool_calls %}"
    "{{ call.function.name + '(' }}{% for name, value in call.function.arguments.items() %}"
    "{{ (', ' if not loop.first else '') + name + '=' + (value | tojson) }}{% endfor %}{{ ')' }}"
    "{% endfor %}{{ '</function_calls>' }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (  # no tools; other roles than two are refused
    "{{- '<bos>' }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}"
    "{{- m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_MISTRAL_TOKENS = (
    "</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_DEEPSEEK_TOKENS = (
    "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
WITH_TOOLS = {
    "qwen": (QWEN, ("<|im_end|>", "<|im_start|>")),
    "llama": (
        LLAMA,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": (MISTRAL, _MISTRAL_TOKENS),
    "mistral_list": (MISTRAL_LIST, _MISTRAL_TOKENS),
    "deepseek": (DEEPSEEK, _DEEPSEEK_TOKENS),
    "deepseek_plain": (DEEPSEEK_PLAIN, _DEEPSEEK_TOKENS),
    "gpt_oss": (
        GPT_OSS,
        ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>",
         "<|call|>"),
    ),
    "kimi": (
        KIMI,
        ("<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
         "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "phi": (
        PHI,
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>",
         "<|tool_call|>", "<|/tool_call|>"),
    ),
    "smollm": (SMOLLM, ("<|im_end|>", "<|im_start|>")),
    "olmo": (OLMO, ("<|im_end|>", "<|im_start|>")),
}  # fmt: skip
