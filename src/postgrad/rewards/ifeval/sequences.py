"""IFBench's rules for all words or sentences, one after another."""

import string
from collections import Counter
from itertools import groupby, pairwise

from postgrad.rewards.ifeval.instruction import (
    FromOne,
    Instruction,
    NonNegative,
    Text,
    Word,
    bare,
    plain,
)
from postgrad.rewards.ifeval.keywords import whole_word
from postgrad.rewards.ifeval.length import sentences, whole_words
from postgrad.rewards.ifeval.positions import KeywordAtPosition

_ALPHABET = string.ascii_lowercase
_VOWELS = frozenset("aeiou")
_CONSONANTS = frozenset(_ALPHABET) - _VOWELS
_MOST_VOWELS, _PALINDROMES, _LEAST_LENGTH = 3, 10, 5


class AlphabetLoop(Instruction):
    """Each word begins with the letter after that of the word before it, with a after z."""

    def follows(self, text: str) -> bool:
        places = [_ALPHABET.find(word[0].lower()) for word in plain(text).split()]
        if not places or -1 in places:
            return False
        return all(b == (a + 1) % len(_ALPHABET) for a, b in pairwise(places))


class ThreeVowels(Instruction):
    """One line with at most three of the vowels a, e, i, o, u."""

    def follows(self, text: str) -> bool:
        line = text.strip()
        return "\n" not in line and len(_VOWELS & set(line.lower())) <= _MOST_VOWELS


class ConsonantClusters(Instruction):
    """Every word has two consonants side by side; y is one."""

    def follows(self, text: str) -> bool:
        return all(
            any(a in _CONSONANTS and b in _CONSONANTS for a, b in pairwise(word))
            for word in text.lower().split()
        )


class TenPalindromes(Instruction):
    """Ten or more palindromes of five or more letters, in any case."""

    def follows(self, text: str) -> bool:
        words = plain(text).lower().split()
        palindromes = [word for word in words if len(word) >= _LEAST_LENGTH and word == word[::-1]]
        return len(palindromes) >= _PALINDROMES


class PrimeLengths(Instruction):
    """The length of every word is a prime number, without punctuation."""

    def follows(self, text: str) -> bool:
        return all(map(_is_prime, set(map(len, plain(text).split()))))


class LimitedRepeats(Instruction):
    """No word occurs more than small_n times, in any case."""

    small_n: NonNegative

    def follows(self, text: str) -> bool:
        counts = Counter(plain(text).lower().split())
        return max(counts.values(), default=0) <= self.small_n


class LastWordComesFirst(Instruction):
    """The last word of each sentence is the first of the next, in any case."""

    def follows(self, text: str) -> bool:
        words = [_bare_words(sentence) for sentence in sentences(text)]
        return all(a[-1:] == b[:1] != [] for a, b in pairwise(words))


class ParagraphEndsAsItBegins(Instruction):
    """Every line begins and ends with the same word, in any case."""

    def follows(self, text: str) -> bool:
        lines = (_bare_words(line) for line in text.split("\n"))
        return all(words[:1] == words[-1:] for words in lines)


class NoConsecutiveInitials(Instruction):
    """No two words side by side begin with the same character, in any case."""

    def follows(self, text: str) -> bool:
        initials = [word[0] for word in plain(text).lower().split()]
        return all(a != b for a, b in pairwise(initials))


class KeywordAtPositionInAnyCase(KeywordAtPosition):
    """The mth word of the nth sentence is the keyword, in any case; the first is 1."""

    def follows(self, text: str) -> bool:
        return self.word_there(text).lower() == self.keyword.lower()


class WordsAtBothEnds(Instruction):
    """The second word and the last but one are the keyword, in any case."""

    keyword: Word

    def follows(self, text: str) -> bool:
        words = whole_words(text.lower())
        return len(words) > 1 and words[1] == words[-2] == self.keyword.lower()


class KeywordInSentence(Instruction):
    """The Nth sentence has the word as a whole word, in any case; the first is 1."""

    word: Text
    N: FromOne

    def follows(self, text: str) -> bool:
        nth = sentences(text)[self.N - 1 : self.N]
        return any(whole_word(self.word).search(sentence) for sentence in nth)


class SentenceIncrement(Instruction):
    """Each sentence has exactly small_n words more than the one before it."""

    small_n: NonNegative

    def follows(self, text: str) -> bool:
        counts = [len(plain(sentence).split()) for sentence in sentences(text)]
        return bool(counts) and all(b == a + self.small_n for a, b in pairwise(counts))


class AlliterationIncrement(Instruction):
    """Each sentence has more words than the one before it that stand beside another with the same
    first character.
    """

    def follows(self, text: str) -> bool:
        counts = [_alliterative(sentence) for sentence in sentences(text)]
        return all(a < b for a, b in pairwise(counts))


class SentenceAlphabet(Instruction):
    """26 sentences begin with the letters from a to z."""

    def follows(self, text: str) -> bool:
        initials = [sentence[0].lower() for sentence in sentences(text)]
        return initials == list(_ALPHABET)


def _bare_words(text: str) -> list[str]:
    return [word for word in map(bare, text.split()) if word]


def _alliterative(sentence: str) -> int:
    runs = groupby(word[0] for word in _bare_words(sentence))
    return sum(length for length in (sum(1 for _ in run) for _, run in runs) if length > 1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


KINDS: dict[str, type[Instruction]] = {
    "words:alphabet": AlphabetLoop,
    "words:vowel": ThreeVowels,
    "words:consonants": ConsonantClusters,
    "words:palindrome": TenPalindromes,
    "words:prime_lengths": PrimeLengths,
    "words:repeats": LimitedRepeats,
    "words:last_first": LastWordComesFirst,
    "words:paragraph_last_first": ParagraphEndsAsItBegins,
    "words:no_consecutive": NoConsecutiveInitials,
    "words:keywords_specific_position": KeywordAtPositionInAnyCase,
    "words:words_position": WordsAtBothEnds,
    "sentence:keyword": KeywordInSentence,
    "sentence:increment": SentenceIncrement,
    "sentence:alliteration_increment": AlliterationIncrement,
    "custom:sentence_alphabet": SentenceAlphabet,
}
