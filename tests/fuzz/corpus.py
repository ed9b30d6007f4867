"""Good input of each kind, which the targets damage."""

# ruff: noqa: E501, W291

SCHEDULES = r"""
auto
auto:lookup=2,recycle=off
plain
eesd
eesd:length=4,stop_rule=confidence=0.5
eesd:max_chunk=4,first_chunk=4,lookahead=8,stop_rule=beta
eesd:stop_rule=calibrated
eesd:lookup=3,stop_rule=survival
ppsd
ppsd:lookahead=5,overlap=on
elastic
elastic:first_chunk=0,max_chunk=15,stop_rule=fixed
elastic:lookahead=15
lookup:lookup=1
""".strip().splitlines()

DEVICES = r"""
auto
cpu
cuda
cuda:0
cuda:0,cuda:1
cpu:0,cpu:1
""".strip().splitlines()

EXIT_HEADS = r"""
auto
none
norm:1
norm:2:50
{model}/model.safetensors
{model}
{gguf}
""".strip().splitlines()

COMMAND_LINES = r"""
-m {model} --exit-head norm:1 --threads 1 -n 3 Hello
generate -m {model} --exit-head {head} --threads 1 -n 3 --schedule eesd:length=2 --json Hello
-m {model} --exit-head norm:1 --threads 2 -n 3 --trace {existing} --raw Hello
-m {model} --threads 1 -n 3 --prompts {prompts} --compare --explain
-m {model} --threads 1 -n 3 --chat --system Short
-m {model} --backend torch --threads 1 -n 2 --temperature 0.5 --top-k 9 --top-p 0.9 --seed 3 --stop a Hello
-m {gguf} --threads 1 -n 2 --dtype int8 --raw Hello
-m {model} --threads 1 -n 2 --device cpu --stages 2 --exit-head norm:1 -
info -m {model} --exit-head norm:1 --threads 1 --json
info -m {model} --exit-head {head} --threads 1
convert {gguf} {out} --dtype bfloat16
check -m {model} --exit-head norm:1 --threads 1 --prompts {prompts} --json
check -m {model} --exit-head norm:1 --threads 1 --prompts {prompts} --schedule eesd --schedule elastic --sampling greedy,warm
heads norm:1 {head} -m {model} --threads 1 --prompts {prompts} --plot {existing}.svg -o json
lab simulate --stages 2,4 --acceptance 0.6,0.8 --tokens 50 --link-ms 0,1 --save {existing}.json
lab simulate --stages 2 --tokens 50 --save {existing} -o csv
lab bench kernels -m {model} -t 1 --rows 1,2 --kernels qkv --context 8 --dtype float32 -r 1 -o json
lab bench generate -m {model} --exit-head norm:1 -t 1 -p 8 -n 4 --schedule eesd -r 1 -o md
lab eval -m {model} --threads 1 --dtype int8 --text {prompts} --window 16
--version
--help
""".strip().splitlines()

TEMPLATE_PIECES = r"""
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ messages.append(1) }}
{{ ''.__class__.__mro__ }}
{{ self._TemplateReference__context }}
{{ cycler.__init__.__globals__ }}
{{ undefined.a.b }}
{{ raise_exception('a\nb') }}
{{ raise_exception('\x1b[31m') }}
{{ strftime_now('\x00') }}
{{ strftime_now('%' * 100) }}
{{ 1 / 0 }}
{{ 'a' | unknown }}
{% include 'x' %}
{% import 'x' as y %}
{% extends 'x' %}
{% break %}
{{ 1() }}
{{ 'a'() }}
{{ '\ud800' }}
{% if
{# 
{{ dict(a=1) | xmlattr | pprint }}
""".strip().splitlines()

# Templates that models have.
TEMPLATES = [
    r"""{{- bos_token }}{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}
{{ '<|im_start|>system\n' + system_message + ' ' + strftime_now('%d %b %Y') + '<|im_end|>' }}
{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    r"""{%- macro show(value, depth=0) -%}{{ value | tojson(indent=2) }}{%- endmacro -%}
{%- set ns = namespace(first=true) -%}
{%- for message in messages -%}{%- if ns.first and message.role == 'system' -%}{%- set ns.first = false -%}{%- continue -%}{%- endif -%}{% generation %}{{ show(message) }}{% endgeneration %}{%- endfor -%}
{%- if tools is not none -%}{{ tools | map(attribute='name') | join(', ') }}{%- endif -%}{{ eos_token }}
""",
]

PROMPTS = b"""\
{"id": "one", "prompt": "Hello", "family": "a"}
{"id": 2, "prompt": "Once upon a time", "family": "b"}
"""
