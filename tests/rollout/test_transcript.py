"""What a sample has read and written: conversations as runs of its tokens."""

import numpy as np
import pytest

from postgrad.core.records import PlacedImage, Prompt
from postgrad.layout.tree import NO_SHARING
from postgrad.rollout.engine import Completion
from postgrad.rollout.transcript import Transcript

PROMPT = Prompt(3, np.array([1, 2, 3], np.int32), "?", None, "rows", 0)


def ids(*tokens):
    return np.array(tokens, np.int32)


def written(*tokens, experts=None):
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    spans = ((0, len(tokens)),)
    return Completion(3, 0, 0, ids(*tokens), logprobs, "stop", spans, "", experts)


def say(transcript, behind, *tokens, images=()):
    read = transcript.behind(behind, ids(*tokens), images)
    transcript.read(read)
    return read.token_ids.tolist()


def test_turns_behind_the_newest_are_one_conversation():
    transcript = Transcript(PROMPT)
    transcript.write(written(4, 5))
    assert say(transcript, "newest", 6) == [1, 2, 3, 4, 5, 6]
    transcript.write(written(7))
    assert say(transcript, 1, 8) == [1, 2, 3, 4, 5, 6, 7, 8]  # turn 1 is the newest
    assert [turn.opens for turn in transcript.turns] == [False] * 4
    assert [turn.token_ids.tolist() for turn in transcript.turns] == [[4, 5], [6], [7], [8]]


def test_another_conversation_has_all_tokens_that_are_read():
    transcript = Transcript(PROMPT)
    transcript.write(written(4, 5))
    assert say(transcript, "newest", 6) == [1, 2, 3, 4, 5, 6]
    transcript.write(written(7))
    assert say(transcript, "nothing", 9, 9) == [9, 9]
    transcript.write(written(8))
    assert say(transcript, 0, 10) == [1, 2, 3, 4, 5, 10]
    transcript.write(written(11))
    assert say(transcript, 2, 12) == [9, 9, 8, 12]
    opened = [(turn.opens, turn.token_ids.tolist()) for turn in transcript.turns]
    assert opened == [
        (False, [4, 5]), (False, [6]), (False, [7]), (True, [9, 9]), (False, [8]),
        (True, [1, 2, 3, 4, 5, 10]), (False, [11]), (True, [9, 9, 8, 12]),
    ]  # fmt: skip
    silent = [turn for turn in transcript.turns if turn.author == "environment"]
    assert all((turn.logprobs == 0).all() for turn in silent)


def test_nobody_reads_the_prompt_where_the_first_turn_opens_a_conversation():
    transcript = Transcript(PROMPT)
    read = transcript.behind("nothing", ids(9, 9), ())
    assert transcript.tokens_with(read, 2) == 2
    assert say(transcript, "nothing", 9, 9) == [9, 9]
    transcript.write(written(8, 6, experts=chosen(20, 4)))
    assert say(transcript, "newest", 7) == [9, 9, 8, 6, 7]
    transcript.write(written(5, experts=chosen(30, 3)))
    assert say(transcript, 0, 4) == [9, 9, 8, 6, 4]
    transcript.write(written(3, experts=chosen(40, 3)))
    prompt, turns = transcript.with_experts()
    assert prompt.shape == (0, 1, 1)
    assert [(turn.opens, turn.experts.ravel().tolist()) for turn in turns] == [
        (True, [20, 21]), (False, [22, 30]), (False, [31]), (False, [-1]),
        (True, [20, 21, 22, 30, 41]), (False, [-1]),
    ]  # fmt: skip


def test_a_turn_that_there_was_not_is_refused():
    transcript = Transcript(PROMPT)
    transcript.write(written(4))
    for behind in (1, -1):
        with pytest.raises(ValueError, match=f"turn {behind} of the policy, which has had 1"):
            transcript.behind(behind, ids(5), ())


def test_what_conversations_begin_with_alike_counts_once():
    transcript = Transcript(PROMPT)
    transcript.write(written(4, 5))
    again = transcript.behind("newest", ids(6), ())
    assert transcript.tokens_with(again, 2) == 6
    anew = transcript.behind("nothing", ids(1, 2, 9), ())
    assert transcript.tokens_with(anew, 2) == 5 + 1
    assert transcript.tokens_with(anew, 3) == transcript.tokens_with(anew, NO_SHARING) == 5 + 3
    transcript.read(anew)
    transcript.write(written(10))
    behind = transcript.behind(0, ids(7), ())
    assert transcript.tokens_with(behind, 2) == 5 + 2 + 1


def test_images_stand_in_the_conversations_that_show_them():
    def image(*at):
        return PlacedImage("a" * 64, np.array(at))

    shown = Prompt(3, np.array([1, 2, 3], np.int32), "?", None, "rows", 0, images=(image(1),))
    transcript = Transcript(shown)
    transcript.write(written(4))
    say(transcript, "newest", 5, 6, images=(image(0),))
    transcript.write(written(7))
    read = transcript.behind("newest", ids(8), ())
    assert [each.at.tolist() for each in read.images] == [[1], [4]]
    read = transcript.behind(0, ids(5, 5, 9), (image(2),))
    assert [each.at.tolist() for each in read.images] == [[1], [6]]
    transcript.read(read)
    assert [each.at.tolist() for each in transcript.turns[-1].images] == [[1], [6]]
    transcript.write(written(7))
    say(transcript, "nothing", 5, 5, images=(image(0, 1),))
    assert [each.at.tolist() for each in transcript.turns[-1].images] == [[0, 1]]
    assert transcript.turns[1].images[0].at.tolist() == [0]


def test_other_images_and_unknown_experts_are_not_alike():
    def image(digest, *at):
        return PlacedImage(digest * 64, np.array(at))

    shown = Prompt(3, np.array([1, 2, 3], np.int32), "?", None, "rows", 0, images=(image("a", 1),))
    transcript = Transcript(shown)
    transcript.write(written(4))
    for digest, count in (("a", 4 + 2), ("b", 4 + 4)):  # 1 is alike in both
        read = transcript.behind("nothing", ids(1, 2, 3, 5, 6), (image(digest, 1),))
        assert transcript.tokens_with(read, 1) == count
    recorded = Transcript(PROMPT)
    recorded.write(written(4, 5, experts=chosen(10, 5)))
    say(recorded, "nothing", 20)
    recorded.write(written(21, experts=chosen(20, 2)))
    read = recorded.behind(0, ids(6), ())
    assert recorded.tokens_with(read, 1) == 5 + 2 + 2  # token 5 has no experts yet


def chosen(first, tokens):
    """Experts of `tokens` tokens, `first` and up; none of the newest."""
    experts = np.arange(first, first + tokens, dtype=np.int16)[:, None, None]
    experts[-1] = -1
    return experts


def test_experts_of_another_conversation_are_those_of_its_first_tokens_until_it_is_computed():
    transcript = Transcript(PROMPT)
    assert transcript.write(written(4, 5, experts=chosen(10, 5))).experts.ravel().tolist() == [
        10, 11, 12, 13, -1,
    ]  # fmt: skip
    say(transcript, "newest", 6)
    transcript.write(written(7, experts=chosen(20, 3)))  # from token 5 on: the rest is cached
    say(transcript, 0, 6, 8)  # behind 1 2 3 4 5, and 6 is in the cache too
    transcript.write(written(9, experts=chosen(30, 2)))  # computed from token 8 on
    say(transcript, "nothing", 50, 51)
    transcript.write(written(52, experts=chosen(40, 3)))
    prompt, turns = transcript.with_experts()
    assert prompt.ravel().tolist() == [10, 11, 12]
    assert [turn.experts.ravel().tolist() for turn in turns] == [
        [13, 20], [21], [-1], [10, 11, 12, 13, 20, 21, 30], [-1], [40, 41], [-1],
    ]  # fmt: skip
