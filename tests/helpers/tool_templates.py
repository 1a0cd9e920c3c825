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
GPT_OSS = (  # a channel for thoughts; a call ends with a token of its own
    "{%- for tool in tools or [] %}{% if loop.first %}"
    "{{ '<|start|>developer<|message|># Tools' }}{% endif %}{{ '\n' + (tool | tojson) }}"
    "{% if loop.last %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{- '<|start|>assistant to=functions.' }}"
    "{{- call.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (call.function.arguments | tojson) + '<|call|>' }}{% else %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions to=assistant<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
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
WITH_TOOLS = {
    "qwen": (QWEN, ("<|im_end|>", "<|im_start|>")),
    "llama": (
        LLAMA,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": (
        MISTRAL,
        ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "gpt_oss": (
        GPT_OSS,
        ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
    ),
    "phi": (
        PHI,
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>",
         "<|tool_call|>", "<|/tool_call|>"),
    ),
    "smollm": (SMOLLM, ("<|im_end|>", "<|im_start|>")),
    "olmo": (OLMO, ("<|im_end|>", "<|im_start|>")),
}  # fmt: skip
