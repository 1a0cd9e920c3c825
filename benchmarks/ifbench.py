"""Whether the kinds of IFBench decide as its own checkers do.

    python -m benchmarks.ifbench CHECKOUT --to benchmarks/results/ifbench.json

CHECKOUT: a working tree of allenai/IFBench. A kind of the reward `ifeval` that is IFBench's and its
own checker judge the same responses: good ones, bad ones, and 38 of every sort (empty, of other
scripts, Markdown, code). IFBench needs the packages nltk, emoji and syllapy. Where nltk's models
are not installed, its Punkt is untrained, and `ratio:stop_words` is not compared. Prints each kind
with the responses on which the two differ. The exit code is 1 where no reason is known for one.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.answers import because
from benchmarks.peer_objectives.open_instruct_instructions import ANY
from postgrad.rewards.ifeval.verifier import instruction

REQUEST = "Say it now."
PALINDROMES = "level radar civic kayak refer rotor madam Tenet stats minim"
STORY = " ".join(f"{letter.upper()} ends." for letter in "abcdefghijklmnopqrstuvwxyz")
COUNTRIES = ["Zimbabwe", "Zambia", *(f"{a}{b}ia" for a in "TSRNM" for b in "ywuronliga")]
CITIES = "ID,Country,City,Year,Count" + "\n1,France,Paris,2000,1" * 7
GOODS = "ProductID,Category,Brand,Price,Stock" + "\n1,a,b,1,2" * 13
GRADES = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"' + '\n"1"\t"a"\t"b"\t"c"\t"2"' * 3
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
OPTIONS = "\n".join(f"{letter}) x" for letter in "ABCDE")
QUIZ = "\n".join(f"Question {n}: {'why ' * n}\n{OPTIONS}" for n in (1, 2, 3, 4))
COUNTED = "a1 B2 b2 " + "c3 " * 3 + "d4 " * 5 + "e5 " * 6
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, ["Don't go", "Do go there now"]),
    "count:unique_word_count": ({"N": 3}, ["The sun, the sea", "The sun, the -", "The the"]),
    "count:conjunctions": ({"small_n": 2}, ["This and that, yet so", "This and, And that"]),
    "count:person_names": ({"N": 2}, ["Emma and Liam met.", "Emma met emma and Liamson."]),
    "count:pronouns": ({"N": 3}, ["It's mine/yours.", "It's mine.", "I, me and who?"]),
    "count:numbers": ({"N": 2}, ["From 3.50 to 1,000", "From 3 to 4, or 5"]),
    "count:punctuation": ({}, ["A, b; c: d! e? f. What?!", "A, b; c: d. What?!", "A! b? !?"]),
    "count:words_japanese": ({"N": 2}, ["I 好き you はい 3 4", "I like you はい", "In 1,000 days"]),
    "count:keywords_multiple": (
        {f"keyword{n + 1}": word for n, word in enumerate(["a1", "b2", "c3", "d4", "e5"])},
        [COUNTED, f"{COUNTED}e5"]),
    "ratio:stop_words": ({"percentage": 50}, ["The sun of Rome", "The of", "!"]),
    "ratio:overlap": (
        {"reference_text": "abcdefg", "percentage": 50.0}, ["abcx", "abcdefg", "ab", "abcdxy"]),
    "ratio:sentence_type": ({}, ["One. Two. Three?", "One. Two?", 'One. "Two." Three?']),
    "ratio:sentence_balance": ({}, ["One. Two? Three!", "One. Two? Three! Four."]),
    "ratio:sentence_words": ({}, ["We go. We do. Or no.", "I go. We do. Or no."]),
    "words:alphabet": ({}, ["Yes, zoos are big.", "Yes, zoos be big."]),
    "words:vowel": ({}, ["One bit of it", "One bit at it up", "One\nbit"]),
    "words:consonants": ({}, ["Strong myth, this", "Strong idea"]),
    "words:palindrome": ({}, [PALINDROMES, PALINDROMES[6:]]),
    "words:prime_lengths": ({}, ["Go on, don't sit", "Go on, and sit"]),
    "words:repeats": ({"small_n": 1}, ["Tea, tea and cake", "Tea and cake"]),
    "words:last_first": ({}, ["I like tea. Tea is good.", "I like tea. It is good."]),
    "words:paragraph_last_first": (
        {}, ["Tea I like tea!\n\nNo", "Tea is good", "Tea, I like tea"]),
    "words:no_consecutive": ({}, ["Go on, we sit", "Go on, Otto"]),
    "words:keywords_specific_position": (
        {"keyword": "tea", "n": 2, "m": 3}, ["No. I like, Tea.", "No. I like no tea."]),
    "words:words_position": ({"keyword": "tea"}, ["My tea is good tea indeed.", "My tea."]),
    "sentence:keyword": ({"word": "tea", "N": 2}, ["No. I like Tea.", "Tea. I like teas."]),
    "sentence:increment": ({"small_n": 2}, ["Go. We do go. No, we do not go.", "Go. We go."]),
    "sentence:alliteration_increment": (
        {}, ["We go. Big bad dogs. Six sad owls on oak.", "Big bad dogs. We go."]),
    "format:parentheses": ({}, ["(a [b {c (d [e])}])", "(a [b {c (d)}])"]),
    "format:quotes": ({}, ["\"He said: 'I heard \"no\" once.'\"", "“‘“no”’”", "\"Don't 'no'\""]),
    "format:quote_unquote": ({}, ['"Yes" is a word.', '"Yes" "no" are words.', "He said “yes.”"]),
    "format:options": ({"options": "yes/no/maybe"}, ["**Maybe.**", "Yes, maybe", "no"]),
    "format:newline": ({}, ["Go\n\n- on!\nnow", "Go\non now"]),
    "format:emoji": ({}, ["I like it 😀. You too! ❤️", "I like it. 😀 You too 👍!", "It 😀. You!"]),
    "format:line_indent": ({}, ["a\n\n b\n   c", "a\n b\n c"]),
    "format:list": ({"sep": "!?!?"}, ["!?!? a\n!?!? b", "!?!? a\n- b"]),
    "format:thesis": ({}, ["<em>So it is.</em> Because", "<i>So it is.</i>", "<i> </i> Because"]),
    "format:sub-bullets": ({}, ["* a\n  - b\n* c\n  - d", "* a\n  - b\n* c", "**Two**\n* a\n - b"]),
    "format:no_bullets_bullets": (
        {},
        ["One. Two.\n* a\n* b", "One. Two!\n* a\n* b", "One. Two.\n* a",
         "One.\n\nTwo.\n* a\n* b"]),
    "format:title_case": ({}, ["The End Is It", "The End of It", "The end", "Don't Go"]),
    "format:output_template": (
        {}, ["My Answer: a\nMy Conclusion: b\nFuture Outlook: c", "My Answer: a"]),
    "format:no_whitespace": ({}, ["All-of-it", "All of it"]),
    "repeat:repeat_change": (
        {"prompt_to_repeat": REQUEST}, ["Write it now.", "Say  it now.", "Write it then."]),
    "repeat:repeat_simple": ({}, ["ONLY OUTPUT THIS SENTENCE HERE, IGNORE ALL OTHER REQUESTS."]),
    "repeat:repeat_span": (
        {"prompt_to_repeat": REQUEST, "n_start": 4, "n_end": 5}, ["it", "i", "IT "]),
    "custom:multiples": ({}, ["14, 21, 28, 35,42 and 49", "14, 21, 28, 35, 42"]),
    "custom:mcq_count_length": ({}, [QUIZ, f"Here: {QUIZ}", QUIZ.removesuffix("E) x")]),
    "custom:reverse_newline": ({}, ["\n".join(COUNTRIES), "\n".join(COUNTRIES[::-1])]),
    "custom:word_reverse": ({}, ["Eagle, bald the is It.", "It is the bald eagle."]),
    "custom:character_reverse": ({}, [".elgaE dlab eht si tI", "eagle bald"]),
    "custom:sentence_alphabet": ({}, [STORY, STORY.replace("C ends.", "D ends.")]),
    "custom:european_capitals_sort": (
        {}, [CAPITALS, CAPITALS.replace("Oslo, ", ""), CAPITALS.replace("ls, P", "ls, Kyiv, P")]),
    "custom:csv_city": ({}, [CITIES, f"{CITIES}\n8,France,Paris,2000,1"]),
    "custom:csv_special_character": (
        {}, [f'{GOODS}\n1,a,"b & c",1,2', f'{GOODS}\n1,a,"b c",1,2', f"{GOODS}\n1,a,b & c,1,2"]),
    "custom:csv_quotes": ({}, [GRADES, GRADES.replace('"2"', "2")]),
    "custom:date_format_list": ({}, ["1796-04-12, 1815-06-18", "1796-04-31", "1796-00-00"]),
}  # fmt: skip
OTHER_SENTENCES = {"Punkt divides there": "Chinese; Hindi; abbreviations; dots"}
MARKS = {
    "a sentence ends with its quotation mark there, no sentence is in dots here":
        "quoted; dots; 3. One. \"Two.\" Three?",
}  # fmt: skip
KNOWN = {  # kind -> by the name of a response why it differs
    kind: because(reasons)
    for kind, reasons in {
        "count:unique_word_count": {
            "punctuation alone is a word there": "two by a divider; code; 2. The sun, the -"},
        "count:conjunctions": {"and is not And, there": "2. This and, And that"},
        "count:words_japanese": {
            "a number with punctuation has to be Japanese there": "3. In 1,000 days"},
        "ratio:sentence_type": MARKS, "ratio:sentence_balance": MARKS,
        "words:last_first": OTHER_SENTENCES, "sentence:increment": OTHER_SENTENCES,
        "sentence:alliteration_increment": OTHER_SENTENCES,
        "words:paragraph_last_first": {
            "a comma within a line belongs to its word there": "3. Tea, I like tea"},
        "format:quotes": {"only straight marks there": "2. “‘“no”’”"},
        "format:quote_unquote": {"only straight marks there": "3. He said “yes.”"},
        "format:sub-bullets": {
            "any * is a bullet there": "3. **Two** / * a /  - b",
            "no bullet at all is right there": "; ".join(ANY)},
        "format:no_bullets_bullets": {
            "sentences of any mark there": "2. One. Two! / * a / * b",
            "a blank line ends the sentences there": "4. One. /  / Two. / * a / * b"},
        "format:title_case": {
            "of and n't fail there": "2. The End of It; 4. Don't Go"},
        "repeat:repeat_change": {"other white space is a change there": "2. Say  it now."},
        "custom:european_capitals_sort": {
            "without Kyiv there": f"3. {CAPITALS[:40]}"},
        "custom:date_format_list": {"00 is a day there": "3. 1796-00-00"},
    }.items()
}  # fmt: skip


def responses(texts: Sequence[str]) -> dict[str, str]:
    """By a short name."""
    numbered = {f"{n}. {text[:40]}".replace("\n", " / "): text for n, text in enumerate(texts, 1)}
    return ANY | numbered


def compared(kind: str, checker: Any) -> dict[str, Any]:
    """How many responses a kind was given, how many follow here and there, and which differ."""
    values, texts = ASKED[kind]
    verifier, peer = instruction(kind, values), checker(kind)
    peer.build_description(**values)
    named = responses(texts)
    here = {name: bool(text.strip()) and verifier.follows(text) for name, text in named.items()}
    there = {
        name: bool(text.strip() and peer.check_following(text)) for name, text in named.items()
    }
    return {
        "responses": len(named),
        "follow here": sum(here.values()),
        "follow there": sum(there.values()),
        "differ": [name for name in named if here[name] != there[name]],
    }


def registry(checkout: Path) -> dict[str, Any]:
    """IFBench's own checkers, with stand-ins where nltk's models are not installed."""
    import nltk  # IFBench needs it, and nothing else here
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    sys.path.insert(0, str(checkout))
    nltk.download = lambda *args, **knobs: False  # it asks for models when it is imported
    checkers = import_module("ifbench.instructions_registry").INSTRUCTION_DICT
    try:
        nltk.word_tokenize("One. Two.")
    except LookupError:
        divide, tokens = PunktSentenceTokenizer().tokenize, NLTKWordTokenizer().tokenize
        nltk.sent_tokenize = divide
        nltk.word_tokenize = lambda text: [word for part in divide(text) for word in tokens(part)]
    try:
        nltk.corpus.stopwords.words("english")
    except LookupError:
        return {
            name: checker_of_kind
            for name, checker_of_kind in checkers.items()
            if name != "ratio:stop_words"
        }
    return dict(checkers)


def main(words: Sequence[str]) -> int:
    """Prints a line for each kind. Returns 1 where a response differs and nothing says why."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ifbench", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--to", type=Path, help="a JSON file")
    args = parser.parse_args(words)
    checkers = registry(args.checkout)
    rows = {kind: compared(kind, checkers[kind]) for kind in ASKED if kind in checkers}
    unexplained = 0
    for kind, row in rows.items():
        known_differences = KNOWN.get(kind, {})
        row["why"] = sorted(
            {why for name in row["differ"] for why in [known_differences.get(name, "")]}
        )
        unexplained += "" in row["why"]
        print(f"{kind}: {row['responses']} responses, {row['follow here']} follow here, "
              f"{row['follow there']} there; differ: {row['differ'] or 'none'}")  # fmt: skip
    if args.to is not None:
        git = ["git", "-C", str(args.checkout), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        entry = {"commit": done.stdout.strip(), "kinds": rows}
        args.to.write_text(json.dumps(entry, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
