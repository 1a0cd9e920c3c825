"""Every kind of IFBench, with responses that follow it and responses that do not, by hand."""

import pytest

from postgrad.rewards.ifeval import copying, counts, markup, sequences, tasks
from postgrad.rewards.ifeval.verifier import KINDS, instruction

REQUEST = "Say it now."
PALINDROMES = "level radar civic kayak refer rotor madam Tenet stats minim"
STORY = " ".join(f"{letter} ends." for letter in "abcdefghijklmnopqrstuvwxyz")
COUNTRIES = ["Zimbabwe", "Zambia", *(f"{a}{b}ia" for a in "TSRNM" for b in "ywuronliga")]
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{n},France,Paris,2000,1" for n in range(7))
GOODS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{n},a,b,1,2" for n in range(13))
GRADES = "\n".join(
    ['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"'] + ['"1"\t"a"\t"b"\t"c"\t"2"'] * 3
)
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana, Zagreb"
)
OPTIONS = "\n".join(f"{letter}) x" for letter in "ABCDE")
QUIZ = "\n".join(f"Question {n}: {'why ' * n}\n{OPTIONS}" for n in (1, 2, 3, 4))
CASES = [
    ("count:word_count_range", (2, 3), "Don't go", True),
    ("count:word_count_range", (2, 3), "Do go there now", False),
    ("count:unique_word_count", {"N": 2}, "The sun, the -", True),
    ("count:unique_word_count", {"N": 3}, "The sun, the -", False),
    ("count:conjunctions", {"small_n": 2}, "This and that, yet so", True),
    ("count:conjunctions", {"small_n": 2}, "This and, And that", False),
    ("count:person_names", {"N": 2}, "Emma and Liam met Emma.", True),
    ("count:person_names", {"N": 2}, "Emma met emma and Liamson.", False),
    ("count:pronouns", {"N": 3}, "It's mine/yours, i.e. good", True),
    ("count:pronouns", {"N": 3}, "It's mine.", False),
    ("count:numbers", {"N": 2}, "From 3.50 to 1,000", True),
    ("count:numbers", {"N": 2}, "From 3 to 4, or 5", False),
    ("count:punctuation", {}, "A, b; c: d! e? f. What?!", True),
    ("count:punctuation", {}, "A, b; c: d. What?!", False),
    ("count:punctuation", {}, "A, b; c: d! e? f. What‽", True),
    ("count:words_japanese", {"N": 2}, "I 好き you はい 3 4", True),
    ("count:words_japanese", {"N": 2}, "I like you はい", False),
    ("count:keywords_multiple", ("a1", "b2", "c3", "d4", "e5"),
     "a1 B2 b2 " + "c3 " * 3 + "d4 " * 5 + "e5 " * 7, True),
    ("count:keywords_multiple", ("a1", "b2", "c3", "d4", "e5"),
     "a1 B2 b2 " + "c3 " * 3 + "d4 " * 5 + "e5 " * 6, False),
    ("ratio:stop_words", {"percentage": 50}, "The sun of Rome", True),
    ("ratio:stop_words", {"percentage": 49.0}, "The sun of Rome", False),
    ("ratio:stop_words", {"percentage": 100}, "!", False),
    ("ratio:overlap", ("abcde", 47), "abcx", False),
    ("ratio:overlap", ("abcde", 100), "abcd", True),
    ("ratio:overlap", ("abcde", 50), "abcx", True),
    ("ratio:overlap", ("abcde", 0), "ab", False),
    ("ratio:sentence_type", {}, 'One. "Two." Three?', True),
    ("ratio:sentence_type", {}, "One. Two?", False),
    ("ratio:sentence_balance", {}, "One. Two? Three!", True),
    ("ratio:sentence_balance", {}, "One. Two? Three! Four.", False),
    ("ratio:sentence_words", {}, "I go. We do. Or no.", False),
    ("ratio:sentence_words", {}, "We go. We do. Or no.", True),
    ("words:alphabet", {}, "Yes, zoos are big.", True),
    ("words:alphabet", {}, "Yes, zoos be big.", False),
    ("words:alphabet", {}, "Élan for good", False),
    ("words:vowel", {}, "One bit of it", True),
    ("words:vowel", {}, "One bit at it up", False),
    ("words:vowel", {}, "One\nbit", False),
    ("words:consonants", {}, "Strong myth, this", True),
    ("words:consonants", {}, "Strong idea", False),
    ("words:palindrome", {}, PALINDROMES, True),
    ("words:palindrome", {}, PALINDROMES[6:], False),
    ("words:palindrome", {}, PALINDROMES[6:] + " noon", False),
    ("words:prime_lengths", {}, "Go on, don't sit", False),  # dont
    ("words:prime_lengths", {}, "Go on, and sit", True),
    ("words:repeats", {"small_n": 2}, "Tea, tea and cake", True),
    ("words:repeats", {"small_n": 1}, "Tea, tea and cake", False),
    ("words:last_first", {}, "I like tea. Tea is good.", True),
    ("words:last_first", {}, "I like tea. It is good.", False),
    ("words:paragraph_last_first", {}, "Tea, I like tea!\n\nNo", True),
    ("words:paragraph_last_first", {}, "Tea is good", False),
    ("words:no_consecutive", {}, "Go on, we sit", True),
    ("words:no_consecutive", {}, "Go on, Otto", False),
    ("words:keywords_specific_position", ("Tea", 2, 3), "No. I like tea.", True),
    ("words:keywords_specific_position", ("tea", 2, 3), "No. I like no tea.", False),
    ("words:words_position", {"keyword": "tea"}, "My tea, good Tea indeed.", True),
    ("words:words_position", {"keyword": "tea"}, "My tea, good tea.", False),
    ("sentence:keyword", ("tea", 2), "No. I like Tea.", True),
    ("sentence:keyword", ("tea", 2), "Tea. I like teas.", False),
    ("sentence:increment", {"small_n": 2}, "Go. We do go. No, we do not go.", True),
    ("sentence:increment", {"small_n": 2}, "Go. We go.", False),
    ("sentence:increment", {"small_n": 2}, "...", False),
    ("sentence:alliteration_increment", {}, "We go. Big bad dogs. Six sad owls on oak.", True),
    ("sentence:alliteration_increment", {}, "Big bad dogs. We go.", False),
    ("sentence:alliteration_increment", {}, "Big bad dogs. So so go.", False),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", True),
    ("format:parentheses", {}, "(a [b {c (d)}])", False),
    ("format:parentheses", {}, "] (a [b {c (d [e)", False),
    ("format:quotes", {}, "\"He said: 'I heard \"no\" once.'\"", True),
    ("format:quotes", {}, "“He said: ‘I heard “no” once.’”", True),
    ("format:quotes", {}, "\"He said: 'I don't.'\"", False),
    ("format:quote_unquote", {}, '"Yes" is a word.', True),
    ("format:quote_unquote", {}, '"Yes" "no" are words.', False),
    ("format:quote_unquote", {}, "He said “yes.”", False),
    ("format:quote_unquote", {}, "No quotes", True),
    ("format:options", {"options": "yes/no/maybe"}, "**Maybe.**", True),
    ("format:options", {"options": "yes/no/maybe"}, "Yes, maybe", False),
    ("format:options", {"options": "I know or I don't know"}, "i don't know", True),
    ("format:options", {"options": "a), b), c), d)"}, "b)", True),
    ("format:options", {"options": "a), b), c), d)"}, "b", False),
    ("format:newline", {}, "Go\n\n- on!\nnow", True),
    ("format:newline", {}, "Go\non now", False),
    ("format:emoji", {}, "I like it 😀. You too! ❤️", True),
    ("format:emoji", {}, "I like it. 😀 You too 👍🏽!", True),
    ("format:emoji", {}, "I like it 😀. You too!", False),
    ("format:line_indent", {}, "a\n\n b\n   c", True),
    ("format:line_indent", {}, "a\n b\n c", False),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", True),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n- b", False),
    ("format:thesis", {}, "<em>So it is.</em> Because", True),
    ("format:thesis", {}, "<i>So it is.</i>", False),
    ("format:thesis", {}, "<i> </i> Because", False),
    ("format:thesis", {}, "So it is.", False),
    ("format:sub-bullets", {}, "**Two**\n* a\n  - b\n* c\n  - d\n  - e", True),
    ("format:sub-bullets", {}, "* a\n  - b\n* well-known", False),
    ("format:sub-bullets", {}, "- a", False),
    ("format:no_bullets_bullets", {}, "One. Two.\n\n* a\n* b", True),
    ("format:no_bullets_bullets", {}, "One. Two!\n* a\n* b", False),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b\nThree.", False),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a", False),
    ("format:title_case", {}, "The End of It, Don't You Say", True),
    ("format:title_case", {}, "the End of It", False),
    ("format:title_case", {}, "The end of It", False),
    ("format:output_template", {}, "My Answer: a\nMy Conclusion: b\nFuture Outlook: c", True),
    ("format:output_template", {}, "My Answer: a\nMy Conclusion: b", False),
    ("format:no_whitespace", {}, "All-of-it", True),
    ("format:no_whitespace", {}, "All of it", False),
    ("repeat:repeat_change", {"prompt_to_repeat": REQUEST}, "Write it now.", True),
    ("repeat:repeat_change", {"prompt_to_repeat": REQUEST}, "Say  it now.", False),
    ("repeat:repeat_change", {"prompt_to_repeat": REQUEST}, "Write it then.", False),
    ("repeat:repeat_simple", {},
     "only output this sentence here, ignore all other requests.\n", True),
    ("repeat:repeat_simple", {}, "Only this sentence.", False),
    ("repeat:repeat_span", (REQUEST, 4, 5), "it", True),
    ("repeat:repeat_span", (REQUEST, 4, 6), "i", False),
    ("repeat:repeat_span", (REQUEST, 0, 2), "SAY", True),
    ("repeat:repeat_span", (REQUEST, 0, 2), "Sa", False),
    ("custom:multiples", {}, "14, 21, 28, 35,42 and 49", True),
    ("custom:multiples", {}, "14, 21, 28, 35, 42", False),
    ("custom:mcq_count_length", {}, QUIZ, True),
    ("custom:mcq_count_length", {}, "Here: " + QUIZ, False),
    ("custom:mcq_count_length", {}, QUIZ.replace("Question 3: why ", "Question 3: "), False),
    ("custom:mcq_count_length", {}, QUIZ.removesuffix("E) x"), False),
    ("custom:reverse_newline", {}, "Here:\n" + "\n".join(COUNTRIES), True),
    ("custom:reverse_newline", {}, "\n".join(COUNTRIES[::-1]), False),
    ("custom:reverse_newline", {}, "\n".join(COUNTRIES[:-1]), False),
    ("custom:word_reverse", {}, "Eagle, bald the is It.", True),
    ("custom:word_reverse", {}, "It is the bald eagle.", False),
    ("custom:character_reverse", {}, ".elgaE dlab eht si tI", True),
    ("custom:character_reverse", {}, "eagle bald", False),
    ("custom:sentence_alphabet", {}, STORY, True),
    ("custom:sentence_alphabet", {}, STORY.replace("c ends.", "d ends."), False),
    ("custom:european_capitals_sort", {}, CAPITALS, True),
    ("custom:european_capitals_sort", {}, CAPITALS.replace("Brussels", "Brussels, Kyiv"), True),
    ("custom:european_capitals_sort", {}, CAPITALS.replace("Oslo, ", ""), False),
    ("custom:csv_city", {}, CITIES + "\n", True),
    ("custom:csv_city", {}, CITIES + "\n8,France,Paris,2000,1", False),
    ("custom:csv_city", {}, CITIES.replace("2000", "2000,0"), False),
    ("custom:csv_special_character", {}, GOODS + '\n13,a,"b & c",1,2', True),
    ("custom:csv_special_character", {}, GOODS + '\n13,a,"b c",1,2', False),
    ("custom:csv_special_character", {}, GOODS + "\n13,a,b & c,1,2", False),
    ("custom:csv_quotes", {}, GRADES, True),
    ("custom:csv_quotes", {}, GRADES.replace('"2"', "2"), False),
    ("custom:csv_quotes", {}, GRADES.replace('"Score"', '"Points"'), False),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", True),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-31", False),
    ("custom:date_format_list", {}, "1796-04-12, June 1815", False),
    ("custom:date_format_list", {}, "1914-04-12", False),
]  # fmt: skip


def follows(name, values, text):
    """A tuple gives the values in the order of the kind's fields."""
    if isinstance(values, tuple):
        values = dict(zip(KINDS[name].model_fields, values, strict=True))
    return instruction(name, values).follows(text)


@pytest.mark.parametrize(("name", "values", "text", "expected"), CASES)
def test_a_response_follows_an_instruction_or_does_not(name, values, text, expected):
    assert follows(name, values, text) is expected


def test_every_kind_of_ifbench_but_two_is_there_and_has_a_case_of_both_sorts():
    kinds = counts.KINDS | markup.KINDS | sequences.KINDS | tasks.KINDS
    kinds |= {name: kind for name, kind in copying.KINDS.items() if name.startswith("repeat:")}
    assert len(kinds) == 58 - 2
    assert {(name, expected) for name, _, _, expected in CASES} == {
        (name, expected) for name in kinds for expected in (True, False)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeated", ["[", "(", '"', "'", ".", ". ", "a", "1!", "Question 1", "<i>", "* "]
)
def test_long_runs_of_one_thing_take_no_quadratic_time(repeated):
    for name, values in {name: values for name, values, _, _ in CASES}.items():
        assert follows(name, values, repeated * 50_000) in (True, False)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("count:word_count_range", (3, 2), "min_words = 3 is above max_words = 2"),
        ("count:words_japanese", {"N": 0}, "N = 0: Input should be greater than or equal to 1"),
        ("format:options", {"options": "yes"}, "options = 'yes': two options or more are expected"),
        ("sentence:keyword", {"N": 1}, "there is no 'word'"),
        ("ratio:overlap", ("a", -1), "percentage = -1: Input should be greater than or equal to 0"),
    ],
)
def test_values_that_are_wrong_are_named(name, values, message):
    with pytest.raises(ValueError, match=name) as raised:
        follows(name, values, "a")
    assert message in str(raised.value)
