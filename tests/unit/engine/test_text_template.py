"""Chat templates: transformers' environment, bounded and sandboxed."""

import pytest

from engine.chat_template import ChatTemplate, TemplateRefused
from engine.clock import SimulatedClock

CHAT = [{"role": "user", "content": "hello"}]


def render(source, chat=CHAT, **special):
    return ChatTemplate(source, special).render(chat)


class TestWhatTemplatesMayUse:
    def test_blocks_are_trimmed_and_loops_can_break(self):
        source = (
            "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
            "{{ m.content }}\n{% endfor %}"
        )
        assert render(source, CHAT * 3) == "hello\n"

    def test_tojson_keeps_text_as_it_is(self):
        assert render("{{ messages[0] | tojson }}", [{"content": "é<>"}]) == '{"content": "é<>"}'

    def test_generation_blocks_are_their_body(self):
        assert render("a{% generation %}b{% endgeneration %}c") == "abc"

    def test_namespace_macro_join_and_replace_work(self):
        source = (
            "{% set ns = namespace(n=0) %}{% macro say(x) %}<{{ x }}>{% endmacro %}"
            "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ say(m.content) }}{% endfor %}"
            "{{ ns.n }} {{ ['a', 'b'] | join('-') }} {{ 'xyx'.replace('x', 'z') ~ 'q' ~ 1 }}"
        )
        assert render(source, CHAT * 2) == "<hello><hello>2 a-b zyzq1"

    def test_loop_variables_know_the_length(self):
        source = "{% for m in messages %}{% if loop.last %}{{ loop.length }}{% endif %}{% endfor %}"
        assert render(source, CHAT * 4) == "4"

    def test_special_tokens_are_named(self):
        assert render("{{ bos_token }}!", bos_token="<s>") == "<s>!"

    def test_the_date_comes_from_the_clock_that_was_passed_in(self):
        clock = SimulatedClock(86_400_000.0 * 365)
        assert ChatTemplate("{{ strftime_now('%Y') }}", {}, clock).render(CHAT) == "1971"


class TestRefusals:
    def test_the_templates_own_refusal_names_the_messages(self):
        with pytest.raises(TemplateRefused, match="roles must alternate") as refused:
            render("{{ raise_exception('roles must alternate') }}")
        assert refused.value.field == "messages"

    def test_a_message_that_does_not_fit_is_refused(self):
        with pytest.raises(TemplateRefused):
            render("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}])

    def test_a_broken_template_is_refused_when_it_is_read(self):
        with pytest.raises(TemplateRefused, match="broken"):
            ChatTemplate("{% for %}", {})

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__[1].__subclasses__() }}",
            "{{ ''.__class__ }}{{ raise_exception.__globals__ }}",
            "{{ messages.append(1) }}",
            "{% include '/etc/passwd' %}",
            "{{ lipsum.__globals__ }}",
        ],
    )
    def test_nothing_outside_the_sandbox_can_be_reached(self, source):
        try:
            assert render(source) == ""
        except TemplateRefused:
            return

    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{{ range(10 ** 9) | list }}",
            "{% for i in range(1000000000000) %}{% endfor %}",
            "{{ 'a' * 1000000000000 }}",
            "{{ [1] * 1000000000000 }}",
            "{% set ns = namespace(x='aaaa') %}"
            "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x='aaaa') %}"
            "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set a = 'x' * 9000000 %}{{ a ~ a ~ a }}",
            "{% set a = 'x' * 9000000 %}{{ a }}{{ a }}{{ a }}",
            "{% set a = 'x' * 9000000 %}{{ [a, a, a] | join }}",
            "{% set a = 'x' * 9000000 %}{{ a.replace('x', 'yyyy') }}",
            "{% set a = 'x' * 9000000 %}{{ a | replace('x', 'yyyy') }}",
            "{{ 'x'.ljust(1000000000000) }}",
            "{{ '%1000000000000d' % 1 }}",
            "{{ 'x' | center(1000000000000) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            pytest.param(
                "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
                "{{ f(60) }}",
                marks=pytest.mark.wide,
            ),
        ],
    )
    def test_no_template_runs_away(self, source):
        with pytest.raises(TemplateRefused):
            render(source)
