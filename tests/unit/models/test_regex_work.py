"""How long a regex may look at a text, by the regex alone."""

from __future__ import annotations

import pytest

from llmnode.models.text.regex_work import TEXT, RegexTooHard, work_of

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI_UPPER, KIMI_LOWER = r"[\p{Lu}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lo}\p{M}&&[^\p{Han}]]"
OF_MODELS = {
    "Llama 3": WORDS + REST,
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+" + REST.replace("]+[", "]++["),
    "GPT-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?" + REST,
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+" + REST,
    "EXAONE": r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+" + REST,
    "Command A": r"\d{1,3}(?=(?:\d{3})*\b)",
    "SuperBPE": r"(?=(\d{3})+(?!\d))",
    "Kimi": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+" + REST,
    "BLOOM": " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "Falcon": r"[\p{P}\$\+<=>\^~\|`]+|[0-9][0-9][0-9]",
    "CLIP": r"<\|startoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "T5": r" {2,}|\s{2,}|[\n\r\t]|^▁+$|\A▁|\A +| +\z",
}
HARD = [
    *(r"(a|a|aa)+$", r"(a+)+b", r"(?:a|aa)*b", r"(?:(?:a|aa)*b)*", r"(?:a*a*b)?", r"((a*)*)*b", r"(?:\p{L}+ ?)*$"),
    *(".*b", r"[\s\S]*b", "[^b]*b", r"[^\n]+$", r"[ a]*b", "[ -~]*b", r"[\x00-~]*b", r"\D*b", r"\P{L}*b", "(?:a )*b"),
    *(r"\p{Any}*b", "(?:a?){20}b", "a?" * 20 + "b"),
    *(r"[^\s&&[^ \n]]*b", r"[\S\t]*b", r"[\s\p{L}]*b", "[\t-~]*b", "[\x01-~]*b", "[^x]{0,4000}[^x]{0,4000}b"),
    *("a*a*b", r"[\s\S]*[\s\S]*x", "(?=.*.*b)c", r"\p{L}*(?=\p{L}*b)c", "(?:a{0,63}){0,64}b", "a{0,999}" * 4 + "b"),
    *(r"(a)\1", r"(?<n>a)\g<n>", "(?x)a", r"(?~a)", r"\Qa\E", "a**", "a{1,2}+", "a{,3}", "(?#a)", r"\Ka"),
    *("[a-[b](x*)*]", "[[:alpha:]]*", "[]a](b*)*]", "[a&&b[^c]]", "[a", "[", "[^", "(a", "a)", "\\", "(", "*", "b\\"),
    *("(" * 40 + "a" + ")" * 40, "a" * 5000),
]


@pytest.mark.parametrize("name", OF_MODELS)
def test_the_regexes_of_models_try_few_ways(name: str) -> None:
    assert work_of(OF_MODELS[name]).ways < 32 * TEXT


@pytest.mark.parametrize("regex", HARD)
def test_a_regex_that_may_take_hours_is_refused_or_counted(regex: str) -> None:
    try:
        ways = work_of(regex).ways
    except RegexTooHard:
        return
    assert ways > 100 * TEXT


def test_the_shortest_match_is_known() -> None:
    lengths = {"a": 1, "a*": 0, "ab{3,}": 4, "(?:ab|c){2}": 2, r"\s+(?!\S)": 1, r"\ba?$": 0, "(?=aa)b": 1, "": 0}
    assert {regex: work_of(regex).shortest for regex in lengths} == lengths
