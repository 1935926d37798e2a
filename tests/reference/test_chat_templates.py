"""Chat templates as models have them: which one is used, what goes wrong in one, and that each ends."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from llmnode.client.generate import Token, TokenTiming
from llmnode.client.portal import open_portal
from llmnode.client.sampling import Sampling
from llmnode.core.model import EXACT
from llmnode.errors import ConfigError
from llmnode.models.text import chat_template
from llmnode.models.text.chat_template import ChatTemplate, _Process, is_plain
from llmnode.models.text.template_process import TemplateFailed
from llmnode.models.text.tokenizer import Tokenizer
from llmnode.node.chat import Chat, StopFlag
from llmnode.node.connect_options import OpenClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.reference
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>' + system_message + '<</SYS>>' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|' + message['role'] + "
    "'|>' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WITH_A_MACRO = (
    "{% macro say(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WORK = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over characters": "{% for a in messages[0].content %}{{ messages[0].content }}{% endfor %}",
    "a string of loops": "{% set found = messages[0].content %}{% for a in found %}{% endfor %}",
    "a variable of its own": "{% set x = namespace(y='a') %}{% for m in range(60) %}{% set x.y=x.y+x.y %}{% endfor %}",
    "doubled": "{% set x = 'ab' %}{% set x = x ~ x %}",
    "doubled by two": "{% set x = 'a' %}{% set y = x ~ 'b' %}{% set x = x ~ y %}",
    "escaped again": "{% set x = '\"' %}{% set x = '' ~ [x] %}",
    "escaped as JSON": "{% set x = '\"' %}{% set x = x|tojson %}",
    "multiplied": "{{ 'a' * 10**9 }}",
    "power": "{{ 10**10**10 }}",
    "padded": "{{ 'a'.center(10**9) }}",
    "padded by a filter": "{{ 'a'|center(1000000000) }}",
    "formatted": "{{ '%999999999d' % 3 }}",
    "formatted by a loop": "{% for loop in messages %}{{ loop.content % 3 }}{% endfor %}",
    "another name": "{% set raise_exception = 'a'.center %}{{ raise_exception(999999999) }}",
    "another method": "{{ {'strip': 'a'.center}.strip(999999999) }}",
    "itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}


@pytest.mark.parametrize("source", [CHATML, LLAMA_2, LLAMA_3, "{{ messages[0]['content'] }}"])
def test_templates_of_most_models_need_no_process(source: str) -> None:
    with patch.object(chat_template, "_Process", side_effect=AssertionError):
        assert "hi" in ChatTemplate(source).render(HI, TOKENS)


@pytest.mark.parametrize("source", WORK.values(), ids=WORK)
def test_what_may_be_more_work_than_the_dialogue_is_long_is_not_done_here(source: str) -> None:
    assert not is_plain(source)


def test_a_template_is_ended_in_its_process_and_the_next_has_another() -> None:
    process = _Process()

    def say(source: str) -> str:
        with pytest.raises(TemplateFailed) as failed:
            process.render({"source": source, "messages": HI, "tokens": TOKENS})
        return str(failed.value)

    assert say(WORK["itself"]) == "fails: RecursionError: maximum recursion depth exceeded"
    assert say("{{ raise_exception('no\n\x1b[1msystem role.') }}") == "refuses this dialogue: no [1msystem role"
    assert say("{{ strftime('%d') }}").endswith("'strftime' is undefined")
    assert say("{{ 'a' * 10**11 }}") == say(WORK["a variable of its own"]) == "takes more than 512 MiB of memory"
    assert say("{{ 'a' * 5000000 }}") == "makes a prompt of 5000000 characters"
    assert process.render({"source": "{{ strftime_now('%%') }}", "messages": HI, "tokens": TOKENS}) == "%"
    with patch.object(chat_template, "RENDER_S", 0.3):
        assert say(WORK["loops"]) == "does not end within 0.3 s, or takes too much memory"
    assert not process.is_there
    template = ChatTemplate(WITH_A_MACRO)
    template._process = process
    assert template.render(HI, TOKENS) == "user: hi"
    process = template._process
    del template
    assert not process.is_there, "it ends with its template"


def made(template: object, *, adds_bos: bool = False) -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", "hi", "no", ":", "user", "assistant", "system"]
    vocabulary = Vocabulary(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    vocabulary.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        vocabulary.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    loaded = PreTrainedTokenizerFast(tokenizer_object=vocabulary, chat_template=template, unk_token="<unk>", **TOKENS)
    return Tokenizer(loaded, "org/small")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "org/small has no chat template; use generate without --chat, or another model"),
        ("", "org/small has no chat template; use generate without --chat, or another model"),
        (5, "org/small has no chat template; use generate without --chat, or another model"),
        (
            [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}],
            "org/small has no chat template, only templates for other uses (rag, tool_use); ",
        ),
        (
            "{{ raise_exception('first a system message') }}",
            "of org/small refuses this dialogue: first a system message; ",
        ),
        ("{{ raise_exception(none) }}", "of org/small refuses this dialogue: None; "),
        (
            "{{ messages[0].nothing.at_all }}",
            "of org/small uses a variable that is not defined: 'dict",
        ),
        ("{{ messages + 1 }}", "of org/small fails: TypeError: can only concatenate list"),
        ("{% if false %}x{% endif %}", "of org/small gives no text for this dialogue; "),
        ("{{ ''.__class__ }}{{ ''.__class__.mro }}", "of org/small does what no template may: "),
        ("a" * (1 << 22) + "b", "of org/small is longer than 4194304 characters; "),
    ],
)
def test_what_is_wrong_with_a_template_is_said_in_a_line(template: object, said: str) -> None:
    with pytest.raises(ConfigError) as failed:
        made(template).encode_dialogue([("user", "hi")])
    message = str(failed.value)
    assert said in message and message.endswith("use generate without --chat, or another model")
    assert "\n" not in message and len(message) < 500


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = made([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hi"}])
    assert tokenizer.encode_dialogue([("user", "no")]) == [3]


def test_the_template_alone_writes_the_first_token() -> None:
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert made(f"{{{{ bos_token }}}}{said}", adds_bos=True).encode_dialogue([("user", "hi")]) == [1, 3]
    assert made(said, adds_bos=True).encode_dialogue([("user", "hi")]) == [3]
    assert made(said, adds_bos=True).encode("hi") == [1, 3]


@pytest.fixture
def dialogue() -> Iterator[Chat]:
    """With a model that answers "hi" whatever is said, by a template that does not take "no"."""
    refuses = "{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    refusing = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}} {{% endfor %}}"
    session = SimpleNamespace(position=0)

    @asynccontextmanager
    async def answer() -> AsyncIterator[Any]:
        async def tokens() -> AsyncIterator[Token]:
            yield Token(3, " hi", TokenTiming(0, 0, 0, 0, ()))

        yield tokens()

    client: Any = SimpleNamespace(
        model=SimpleNamespace(digest=b"", precision=EXACT),
        tokenizer=made(refusing),
        ends=SimpleNamespace(check=lambda _ids: None),
        inference_session=lambda _length: nullcontext(session),
        generate=lambda *_asked, **_options: answer(),
        generation_config=GenerationConfig(),
    )
    with open_portal() as portal:
        yield Chat(OpenClient(portal, client), Sampling(), max_new_tokens=4, max_length=64)


def test_a_message_that_the_template_refuses_is_not_part_of_the_dialogue(dialogue: Chat) -> None:
    dialogue.answer("hi", StopFlag())
    with pytest.raises(ConfigError, match="not that"):
        dialogue.answer("no", StopFlag())
    dialogue.answer("hi", StopFlag())
    assert dialogue.turns == [("user", "hi"), ("assistant", " hi")] * 2
