"""Chat templates: the sandbox, Hugging Face's dialect, and errors fit for users."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenizer_svc.chat_refused import ChatRefused
from tokenizer_svc.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, 100_000)
    return template.render(USER if messages is None else messages, **arguments)


def refusal(source: str, **arguments: Any) -> ChatRefused:
    with pytest.raises(ChatRefused) as caught:
        render(source, **arguments)
    for forbidden in ("Traceback", "File ", "/", "<class", "object at", "<function", "<bound"):
        assert forbidden not in caught.value.message
    assert caught.value.message
    assert caught.value.param == "messages"
    return caught.value


def test_bug_56_a_template_cannot_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "MARK"
    for source in (
        "{{ lipsum.__globals__['os'].popen('touch " + str(mark) + "').read() }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}' | format)(messages) }}",
        "{% set x = namespace() %}{% set x.__class__ = 1 %}{{ x.__dict__.update(a=1) }}",
    ):
        refusal(source)
    assert not mark.exists()


def test_bug_56_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "Hi", "tags": ["a"]}]
    before = json.dumps(messages)
    for source in (
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'content': 'forged'}) }}",
        "{{ messages[0].tags.append('b') }}",
        "{{ messages[0].pop('content') }}",
    ):
        refusal(source, messages=messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% extends 'x' %}", "{% import 'x' as y %}{{ y }}"],
)
def test_bug_56_there_is_no_loader(source: str) -> None:
    refusal(source)


def test_bug_30_raise_exception_speaks_to_the_user() -> None:
    error = refusal("{{ raise_exception('Roles must alternate.') }}")
    assert error.message.endswith("Roles must alternate.")
    assert error.code == "chat_template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ messages[7]['content'] }}",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 'text' }}",
        "{{ none + 'text' }}",
        "{{ undefined_function() }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages | tojson(indent={}) }}",
    ],
)
def test_other_errors_are_refusals_without_internals(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open", "{% nonsense %}", "{% if x %}"])
def test_a_template_that_does_not_parse_says_where(source: str) -> None:
    with pytest.raises(ChatRefused, match="line 1"):
        ChatTemplate(source, {}, 1000)


def test_output_is_bounded() -> None:
    error = refusal("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}")
    assert "100000 characters" in error.message


def test_a_template_knows_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_generation_blocks_are_their_content() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
    )
    assert render(source) == "Hi!"


def test_variables_of_the_request_reach_the_template_but_not_over_its_own() -> None:
    source = "{{ bos_token }}{{ documents }}{{ tools }}{{ flag }}{{ add_generation_prompt }}"
    assert render(source, variables={"flag": 7}) == "<s>NoneNone7False"
    assert render(source, variables={"messages": [], "tools": 1, "documents": [2]}) == (
        "<s>[2]NoneFalse"
    )


# Each line is rendered by transformers as well.
DIALECT = [
    "{%- for m in messages %}\n   {{- m.role }}\n  {% if loop.last %}e {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | tojson(ensure_ascii=True) }}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{{ {'html': '<a href=\"x\">&</a>', 'é': '🦜\u2028', 'n': None, 't': true} | tojson }}",
    "{% set n = namespace(n=0) %}{% for m in 'ab' %}{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}",
    "{{ bos_token }}|{{ documents }}|{{ tools }}|{{ add_generation_prompt }}|{{ missing }}|",
    "   {% if true %}  \n   text\n  {% endif %}\n  tail",
    "{{ messages[1:] | length }}{{ messages[::-1][0].content }}",
    "{{ messages | map(attribute='role') | join(',') }}",
    "{{ messages[0].content.split(' ')[-1].strip() | upper }}{{ 'x' in messages[0].content }}",
]


@pytest.mark.parametrize("source", DIALECT)
def test_the_dialect_is_that_of_transformers(source: str) -> None:
    messages = [
        {"role": "user", "content": 'Héllo <b>x</b>\n"q" 🦜'},
        {"role": "assistant", "content": " answer \n"},
        {"role": "user", "content": "more"},
    ]
    expected, _ = render_jinja_template([messages], chat_template=source, bos_token="<s>")
    assert [render(source, messages=messages)] == expected
