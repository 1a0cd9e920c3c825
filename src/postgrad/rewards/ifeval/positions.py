"""Words at places: first, last, the nth of a sentence, side by side."""

from itertools import pairwise

from postgrad.rewards.ifeval.instruction import FromOne, Instruction, Word, bare
from postgrad.rewards.ifeval.length import sentences, whole_words


class FirstWordOfSentences(Instruction):
    """Every sentence begins with the word, in any case."""

    first_word: Word

    def follows(self, text: str) -> bool:
        words = {bare(sentence.split()[0]) for sentence in sentences(text)}
        return words == {bare(self.first_word)}


class FirstWordOfAnswer(Instruction):
    """The response begins with the word, in any case."""

    first_word: Word

    def follows(self, text: str) -> bool:
        return bare(text.split()[0]) == bare(self.first_word)


class LastWordOfSentences(Instruction):
    """Every sentence ends with the word, in any case; punctuation may follow."""

    last_word: Word

    def follows(self, text: str) -> bool:
        words = {bare(sentence.split()[-1]) for sentence in sentences(text)}
        return words == {bare(self.last_word)}


class LastWordOfAnswer(Instruction):
    """The response ends with the word, in any case; punctuation may follow."""

    last_word: Word

    def follows(self, text: str) -> bool:
        return bare(text.split()[-1]) == bare(self.last_word)


class KeywordAtPosition(Instruction):
    """The mth word of the nth sentence is the keyword, letter by letter; the first is 1."""

    keyword: Word
    n: FromOne
    m: FromOne

    def follows(self, text: str) -> bool:
        return self.word_there(text) == self.keyword

    def word_there(self, text: str) -> str:
        """The mth word of the nth sentence; "" where there is none."""
        nth = sentences(text)[self.n - 1 : self.n]
        return "".join(whole_words("".join(nth))[self.m - 1 : self.m])


class SameStartAndEnd(Instruction):
    """The first and the last of two or more words are one, in any case; nothing is around them."""

    def follows(self, text: str) -> bool:
        text = text.strip()
        words = whole_words(text)
        if len(words) < 2 or words[0].casefold() != words[-1].casefold():
            return False
        return text.startswith(words[0]) and text.endswith(words[-1])


class NoAdjacentConsecutive(Instruction):
    """No word begins with the character that follows the first of the word before it."""

    def follows(self, text: str) -> bool:
        initials = [ord(word[0].lower()[0]) for word in text.split()]
        return all(b - a != 1 for a, b in pairwise(initials))


KINDS: dict[str, type[Instruction]] = {
    "first_word:first_word_sent": FirstWordOfSentences,
    "first_word:first_word_answer": FirstWordOfAnswer,
    "last_word:last_word_sent": LastWordOfSentences,
    "last_word:last_word_answer": LastWordOfAnswer,
    "keywords:keyword_specific_position": KeywordAtPosition,
    "keywords:start_end": SameStartAndEnd,
    "keywords:no_adjacent_consecutive": NoAdjacentConsecutive,
}
