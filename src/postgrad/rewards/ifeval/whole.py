"""Rules for the whole response: its beginning and end, its case, its language, no commas."""

import re

from pydantic import field_validator

from postgrad.core.names import nearest
from postgrad.rewards.ifeval.instruction import Count, Instruction, Relation, Text, holds
from postgrad.rewards.ifeval.language import LANGUAGES, base_code, is_written_in

_SEPARATOR = "******"
# A word is one with its hyphens, apostrophes and inner dots: STATE-OF-THE-ART, DON'T, U.S.
_WORD = re.compile(r"\w+(?:[-'’./&]\w+)*+")


class TwoResponses(Instruction):
    """Two different responses with `******` between them; one may also begin or end it all."""

    def follows(self, text: str) -> bool:
        parts = [part.strip() for part in text.split(_SEPARATOR)]
        responses = [part for part in parts if part]
        return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


class RepeatPrompt(Instruction):
    """The response starts with the prompt, in any case."""

    prompt_to_repeat: Text

    def follows(self, text: str) -> bool:
        return text.strip().lower().startswith(self.prompt_to_repeat.lower())


class EndChecker(Instruction):
    """The response ends with the phrase, in any case; double quotation marks may follow."""

    end_phrase: Text

    def follows(self, text: str) -> bool:
        return text.strip().strip('"').lower().endswith(self.end_phrase.lower())


class Quotation(Instruction):
    """The response is wrapped in double quotation marks."""

    def follows(self, text: str) -> bool:
        text = text.strip()
        return len(text) > 1 and text[0] == text[-1] == '"'


class CapitalWordFrequency(Instruction):
    """At least, or less than, so many words in capitals; I and A are such words too."""

    capital_frequency: Count
    capital_relation: Relation

    def follows(self, text: str) -> bool:
        capitals = sum(word.isupper() for word in _WORD.findall(text))
        return holds(capitals, self.capital_relation, self.capital_frequency)


class EnglishCapital(Instruction):
    """The response is English without a lower-case letter."""

    def follows(self, text: str) -> bool:
        return text.isupper() and is_written_in("en", text)


class EnglishLowercase(Instruction):
    """The response is English without a capital letter."""

    def follows(self, text: str) -> bool:
        return text.islower() and is_written_in("en", text)


class NoComma(Instruction):
    """The response has no comma."""

    def follows(self, text: str) -> bool:
        return "," not in text


class ResponseLanguage(Instruction):
    """The response is written in `language`, an ISO 639-1 code."""

    language: Text

    @field_validator("language")
    @classmethod
    def _is_known(cls, code: str) -> str:
        if base_code(code) not in LANGUAGES:
            close = nearest(code, LANGUAGES)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(LANGUAGES))}"
            raise ValueError(f"this language cannot be detected; {hint}")
        return code

    def follows(self, text: str) -> bool:
        return is_written_in(self.language, text)


KINDS: dict[str, type[Instruction]] = {
    "combination:two_responses": TwoResponses,
    "combination:repeat_prompt": RepeatPrompt,
    "startend:end_checker": EndChecker,
    "startend:quotation": Quotation,
    "change_case:capital_word_frequency": CapitalWordFrequency,
    "change_case:english_capital": EnglishCapital,
    "change_case:english_lowercase": EnglishLowercase,
    "punctuation:no_comma": NoComma,
    "language:response_language": ResponseLanguage,
}
