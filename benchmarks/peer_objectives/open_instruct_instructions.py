"""Open-Instruct's instructions, each kind on responses that follow it or not, or nearly.

Where nltk's models are not installed, its Punkt is untrained, and the peer's own rules divide a
text into sentences before nltk divides them into words. Without langdetect kinds that ask it are
not compared.
"""

import ast
import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import Answer, Scored, because
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.open_instruct import words_of

ANY = {
    "nothing": "", "spaces": " \n ", "one word": "Sun", "one sentence": "The sun is up.",
    "two sentences": "The sun is up. The sea is calm.", "exclaimed": "Hello! Is it noon? Yes.",
    "marks in a row": "What?! No way!!! Really...", "no end": "the sun and the sea",
    "capitals": "THE SUN IS UP.", "accents": "Élan vital, déjà vu à Paris.",
    "German": "Das ist nicht mein Haus. Es ist groß.", "Chinese": "这不是我的房子。天空很蓝。",
    "Hindi": "यह मेरा घर नहीं है। आसमान नीला है।", "emoji": "I like it 😀. You too? 🎉",
    "bullets": "* one\n* two\n- three", "numbered": "1. Sun is up.\n2. Sea is calm.",
    "heading": "# The Sun\n\nIt is **up** and *bright*.", "two paragraphs": "The sun.\n\nThe sea.",
    "three breaks": "The sun.\n\n\nThe sea.", "four breaks": "The sun.\n\n\n\nThe sea.",
    "two by a divider": "One.\n***\nTwo.", "three by dividers": "One.\n***\nTwo.\n***\nThree.",
    "code": "```python\nprint('sun')\n```", "JSON": '{"sun": 1}', "quoted": '"The sun is up."',
    "curly quotes": "“The sun is up.” He said so.", "brackets": "[The] [sun] [is] [up]",
    "pairs": "<<The sun>> <<is up>>", "contractions": "Don't say it isn't so.",
    "abbreviations": "Dr. Smith lives in the U.S. today, e.g. in Ohio.", "dots": "...",
    "hyphens": "A well-known one-off.", "numbers": "It costs 3.50, or 1,000 in all.",
    "other line ends": "One.\r\nTwo.", "tab": "One\ttwo.", "tea": "Tea and tea and TEA.",
    "white space around": "\n The sun is up. \n", "web": "See example.com or a.b@c.de now.",
}  # fmt: skip

_REPEATED = "Say it now."
_PHRASE = "The early bird catches the worm"
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "keywords:existence": ({"keywords": ["sun", "sea"]}, ["Sunny seas.", "sun", "SEA SUN"]),
    "keywords:frequency": (
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        ["tea", "tea, steam", "team tea tea"]),
    "keywords:forbidden_words": ({"forbidden_words": ["sun", "it"]}, ["Sunny.", "its", "It"]),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"}, ["eee", "Ee", "é e e"]),
    "language:response_language": (
        {"language": "de"},
        ["Ich habe heute keine Zeit, aber morgen komme ich gern zu euch.",
         "I have no time today, but I will gladly come tomorrow."]),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"}, ["A b. C d. E f.", "One", "One. Two!"]),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2}, ["***\na\n***\nb\n***", "a\n***\n***\nb", "a\n* * *\nb"]),
    "length_constraints:number_words": (
        {"num_words": 4, "relation": "less than"}, ["a b c", "a b c d", "a-b c-d"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "the"},
        ["A.\n\n'The' b.", "The.\n\nA.", "A.\n\nThen."]),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2}, ["[a] [b]", "[a\nb] [c]", "[[a] [b]]"]),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."}, ["Bye.\n\nP.S. Oh", "Bye.\np. s. Oh", "PS oh"]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2}, ["* a\n  - b", "- a\n- b\n- c", "**a**\n* b\n*c"]),
    "detectable_format:constrained_response": (
        {}, ["My answer is yes.", "Well. My answer is no. Or so.", "my answer is maybe."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, ["*a* **b**", "* * **a**", "*a\nb* *c*"]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2", "SECTION 1\nSECTION 2"]),
    "detectable_format:json_format": ({}, ["[1]", "```json\n[1]\n```", "Here: [1]", "12"]),
    "detectable_format:title": ({}, ["<<A title>>\nText", "<< >>", "<a title>"]),
    "combination:two_responses": (
        {}, ["A.\n******\nB.", "A.\n******\nA.", "A.\n******\n******\nB."]),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": _REPEATED}, [f"{_REPEATED} It.", "SAY IT NOW. It", "So: say it now."]),
    "startend:end_checker": (
        {"end_phrase": "The end."}, ["So. The end.", 'So. "the end."', "The end. So."]),
    "startend:quotation": ({}, ['"All."', '"', '"a" b "c"', "'a'"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I AM", "A b c", "NASA and the U.S. are BIG", "DON'T"]),
    "change_case:english_capital": (
        {},
        ["THIS IS THE WAY THAT WE ALL GO TODAY.", "THIS is the way.", "DAS IST NICHT MEIN HAUS."]),
    "change_case:english_lowercase": (
        {}, ["this is the way that we all go today.", "this is The way.", "das ist mein haus."]),
    "punctuation:no_comma": ({}, ["No; none.", "1,000"]),
    "punctuation:punctuation_dot": ({}, ["Yes! No…", "3.5"]),
    "punctuation:punctuation_exclamation": ({}, ["Yes.", "¡Sí!"]),
    "keywords:word_once": ({"keyword": "sun"}, ["Sunny sun.", "The SUN."]),
    "keywords:word_count_different_numbers": (
        {"keyword": "sun", "frequency": 2, "relation": "less than"}, ["Sun sun.", "Sunny."]),
    "keywords:exclude_word_harder": (
        {"keyword": "sun"}, ["A sun up.", "A Sun up.", "A sunny day.", "It is the sun."]),
    "keywords:palindrome": (
        {}, ["A level floor", "Level it!", "We saw mom.", "It is at night.", "radar: 11"]),
    "keywords:keyword_specific_position": (
        {"keyword": "tea", "n": 2, "m": 3},
        ["Hello. I like tea too.", "Hello. I like Tea too.", "Hello. Yes, I tea.",
         "tea. tea tea."]),
    "keywords:start_end": (
        {}, ["Tea, I like tea", "Tea, I like tea.", "Tea", "**Tea** I like tea", "Tea I like TEA",
             "Don't, I say, don't"]),
    "keywords:no_adjacent_consecutive": (
        {}, ["apple cat bear", "apple Bear", "1 2", "İzmir kent", "a bee"]),
    "letters:letter_counting": ({"N": 5, "relation": "at least"}, ["né 12, ok", "abcde", "abcd"]),
    "letters:letter_counting2": (
        {"letter": "t", "let_frequency": 2, "let_relation": "at least"}, ["The cat", "tea"]),
    "count:lowercase_counting": (
        {"N": 2}, ["THE cat IS 1st, é", "I don't go", "ALL", "über alles so"]),
    "count:count_unique": (
        {},
        ["Every word differs here", "The sun and the sea", "Sun, sea, sand", "The sun, the sea"]),
    "count:counting_composition": (
        {"n_sent": 2, "n_words": 3},
        ["I go now. You go too.\n***\nA b c. D e f.\n***\nG h i. J k l.",
         "I go. You do.\n***\nA b. D e.\n***\nG h. J k.",
         "I go now. You go too.\n* * *\nA b c. D e f.\n* * *\nG h i. J k l.",
         "***\nI go. You do.\n***\nA b. D e.\n***\nG h. J k.\n***"]),
    "count:count_increment_word": (
        {"keyword1": "sun", "keyword2": "sea"},
        ["Sea, Sun and sea.", "Sun and seas.", "seasea sunny"]),
    "paragraphs:paragraphs": ({}, ["***\na\n***\nb\n***", "a\n***\n***\nb", "a\n* * *\nb"]),
    "paragraphs:paragraphs2": ({}, ["a\n\nb\n\nc", "a\nb\n\nc"]),
    "first_word:first_word_sent": (
        {"first_word": "the"},
        ["The sun is up. the sea is calm.", "The, yes. The", "The a. A the.", "**The** sun."]),
    "first_word:first_word_answer": (
        {"first_word": "the"}, ["the. sun", "The, well.", "Then.", "**The** sun.", '"The sun"']),
    "last_word:last_word_sent": (
        {"last_word": "up"},
        ["It is up! Look \"up\".", "Up we go.", "It is up. So it is up", "It is up: up-up."]),
    "last_word:last_word_answer": (
        {"last_word": "up"}, ["It is UP...", "It is up. Yes.", "It is **up**", "It is up 😀"]),
    "copy:copy": ({"prompt_to_repeat": _REPEATED}, [_REPEATED, "SAY IT NOW.\n", "Say it now"]),
    "copy:copying_simple": ({"prompt_to_repeat": _REPEATED}, [_REPEATED, f'"{_REPEATED}"']),
    "copy:copying_multiple": (
        {"prompt_to_repeat": _REPEATED, "N": 2},
        ["Say it now.\n******\nsay it now.", _REPEATED,
         "Say it now.\n******\nSay it now.\n******"]),
    "copy:repeat_phrase": (
        {"phrase": _PHRASE, "small_n": 2},
        ["The early dog catches the worm. The early bird eats the worm.",
         f"{_PHRASE}. The early bird eats the worm.", "The early dog catches the worm.",
         "The early dog eats the worm. The early bird eats the worm.",
         "The early dog\ncatches the worm. The early bird eats the worm.",
         "* The late bird catches the worm\n* The early bird finds the worm"]),
    "new:copy_span_idx": (
        {"prompt_to_repeat": _REPEATED, "n_start": 4, "n_end": 6},
        ["it", "it ", "IT\n", "it n", "Say it", _REPEATED]),
    "detectable_format:sentence_hyphens": (
        {}, ["One here.-Two here.-Three", "One here.- Two here.", "One here.-Two here.-",
             "A well-known one.-Two here.", "One here.-Two\nhere."]),
    "detectable_format:square_brackets": ({}, ["[All]\n[of,] [it.]", "[All of] [it]", "[All]."]),
    "detectable_format:bigram_wrapping": (
        {}, ["<<I am>> <<at home>> now", "<<I am>> at home", "<<I>> <<am>>", "I <<am at>>"]),
}  # fmt: skip
OF_LANGUAGE = "langdetect guesses there, a text without letters counts as any language"
OF_WORDS = "punctuation and parts of a contraction are words there"
OF_LETTERS = "only letters from a to z count there"
OF_EDGES = "punctuation belongs to a first word there"
OF_SENTENCES = "a text is divided into sentences by other rules there"
DIFFERING: dict[str, dict[str, str]] = {  # kind -> why, and names of responses
    "language:response_language": {OF_LANGUAGE: "dots"},
    "change_case:english_lowercase": {OF_LANGUAGE: "code; JSON"},
    "length_constraints:number_sentences": {
        "Punkt there": "Chinese; Hindi; abbreviations; A b. C d. E f."},
    "length_constraints:nth_paragraph_first_word": {
        "a blank paragraph counts there": "four breaks"},
    "change_case:capital_word_frequency": {OF_WORDS: "DON'T"},
    "keywords:exclude_word_harder": {
        "only a word between two spaces, letter by letter, is seen there":
            "one word; capitals; numbered; heading; two paragraphs; three breaks; four breaks; "
            "code; JSON; brackets; pairs; A Sun up.; It is the sun."},
    "keywords:palindrome": {
        "one character is a palindrome there":
            "accents; emoji; bullets; heading; two by a divider; three by dividers; code; dots; "
            "hyphens",
        "capitals and punctuation hide one there": "exclaimed; Level it!; We saw mom."},
    "keywords:keyword_specific_position": {OF_WORDS: "Hello. Yes, I tea."},
    "keywords:start_end": {OF_WORDS: "Don't, I say, don't"},
    "keywords:no_adjacent_consecutive": {"İ has two characters in lower case": "İzmir kent"},
    "letters:letter_counting": {OF_LETTERS: "Chinese; Hindi"},
    "count:lowercase_counting": {OF_LETTERS: "accents; über alles so"},
    "count:count_unique": {
        OF_WORDS:
            "marks in a row; bullets; heading; two by a divider; three by dividers; code; "
            "curly quotes; brackets; pairs; contractions; other line ends; web; Sun, sea, sand",
        "The and the are two words there": "The sun and the sea; The sun, the sea"},
    "count:counting_composition": {
        OF_WORDS:
            "I go now. You go too. / *** / A b c. D e f. / *** / G h i. J k l.; "
            "I go now. You go too. / * * * / A b c. D e f. / * * * / G h i. J k l."},
    "first_word:first_word_sent": {
        OF_EDGES: "quoted; brackets; pairs; The, yes. The; **The** sun.",
        OF_SENTENCES: "The a. A the."},
    "first_word:first_word_answer": {
        OF_EDGES: "quoted; curly quotes; brackets; pairs; the. sun; The, well.; **The** sun.; "
                  '"The sun"'},
    "detectable_format:sentence_hyphens": {
        OF_SENTENCES: "Chinese; Hindi; quoted; web",
        "a line end within a sentence is an error there": "heading; code; One here.-Two / here."},
}  # fmt: skip
OF_TAGS = because({"what is behind </think> and within <answer> is judged there":
                   "thoughts; answer tags"})  # fmt: skip
SEVERAL = {
    "punctuation:no_comma": {}, "detectable_format:title": {},
    "length_constraints:number_words": {"relation": "less than", "num_words": 8},
    "keywords:existence": {"keywords": ["sun", "sea"]},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "startend:end_checker": {"end_phrase": "The end."},
}  # fmt: skip
TO_SEVERAL = {
    "all but bullets": "<<A day>>\nThe sun and the sea. The end.",
    "all": "<<Day>>\n* Sun\n* sea\nThe end.", "no title": "* Sun\n* sea\nThe end.",
    "comma": "<<Day>>\n* Sun, \n* sea\nThe end.", "too long": "<<Day>>\n* Sun\n* sea\n" + "a " * 9,
    "other end": "<<Day>>\n* Sun\n* sea\nThe end!", "other case": "<<DAY>>\n* SUN\n* SEA\nTHE END.",
    "quoted end": '<<Day>>\n* Sun\n* sea\n"The end."', "dashes": "<<Day>>\n- Sun\n- sea\nThe end.",
    "nothing": "", "spaces": "  ",
    "thoughts": "<think>a, b, c</think><<Day>>\n* Sun\n* sea\nThe end.",
    "answer tags": "<answer><<Day>>\n* Sun\n* sea\nThe end.</answer>",
}  # fmt: skip


def instruction_cases(checkout: Path) -> Iterator[Scored]:
    """IFEvalVerifier: several instructions of a row, and every kind."""
    peer = partial(_score, _verifier(checkout))
    words = words_of("allenai/IF_multi_constraints_upto5")
    several = {"instruction_id": [*SEVERAL], "kwargs": [*SEVERAL.values()]}
    answers = [Answer(name, text, repr([json.dumps(several)])) for name, text in TO_SEVERAL.items()]
    yield Scored("IFEvalVerifier", words, peer, answers, OF_TAGS, "behind </think>")
    for kind, (values, texts) in ASKED.items():
        if (
            kind.startswith(("language:", "change_case:english"))
            and find_spec("langdetect") is None
        ):
            continue
        row = repr([{"instruction_id": [kind], "kwargs": [values or None]}])
        answers = [Answer(name, text, row) for name, text in named(texts).items()]
        differing = because(DIFFERING.get(kind, {}))
        yield Scored(f"IFEvalVerifier, {kind}", words, peer, answers, differing, "rewards.md")


def named(texts: Sequence[str]) -> dict[str, str]:
    """Responses by their names."""
    return ANY | {text.replace("\n", " / "): text for text in texts}


def _score(verifier: Any, answer: Answer) -> float:
    return 10.0 * verifier([], answer.text, answer.reference)  # verification_reward


def _verifier(checkout: Path) -> Any:
    """Open-Instruct's own IFEvalVerifier."""
    files = Checkout(checkout / "open_instruct", ["langdetect", "absl", "immutabledict"])
    registry = files.module("open_instruct.IFEvalG.instructions_registry")
    _without_models(files.module("open_instruct.IFEvalG.instructions_util"))
    space: dict[str, Any] = {
        "ast": ast, "json": json, "VerifierFunction": object, "VerifierConfig": Any,
        "VerificationResult": lambda score: score, "logger": logging.getLogger("peer"),
        "instructions_registry": registry,
    }  # fmt: skip
    path = checkout / "open_instruct" / "ground_truth_utils.py"
    for name in ("def remove_thinking_section", "class IFEvalVerifier("):
        statements(path, name)(space)
    if find_spec("langdetect") is not None:
        files.module("langdetect").DetectorFactory.seed = 0  # else it guesses anew each time
    return space["IFEvalVerifier"].__new__(space["IFEvalVerifier"])


def _without_models(util: Any) -> None:
    """Stands in for what needs nltk's models, where they are not installed."""
    import nltk  # Open-Instruct needs it, and nothing else here
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    try:
        nltk.word_tokenize("One. Two.")
    except LookupError:
        divide, tokens, punkt = (
            util.split_into_sentences, NLTKWordTokenizer().tokenize, PunktSentenceTokenizer()
        )  # fmt: skip
        nltk.word_tokenize = lambda text: [word for part in divide(text) for word in tokens(part)]
        util._get_sentence_tokenizer = lambda: punkt
