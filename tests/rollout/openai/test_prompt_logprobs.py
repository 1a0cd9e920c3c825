"""A teacher's server: its grades are read token by token, and whatever is no grade ends the run."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from contracts.conftest import small_tokenizer
from helpers.chat_server import Answer, ChatServer, chat_server
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.rollout.openai.prompt_logprobs import ServedTeacher
from postgrad.rollout.openai.settings import TeacherServerSettings

MODELS = json.dumps({"data": [{"id": "a"}, {"id": "b", "root": "org/b"}]}).encode()
Grade = Callable[[list[int]], Any]
Make = Callable[..., tuple[ServedTeacher, ChatServer]]


def reply(entries: Any) -> Answer:
    return Answer(raw=json.dumps({"choices": [{"text": "", "prompt_logprobs": entries}]}).encode())


def graded(ids: list[int]) -> Any:
    """The logprob of a token is minus a tenth of its id; another token is named beside it."""
    return [None, *({str(i): {"logprob": -i / 10}, "9": {"logprob": -9.0}} for i in ids[1:])]


def by_letter() -> Any:
    """A tokenizer with a token for each letter: "abc" is three."""
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return tokenizer


@pytest.fixture
def make() -> Iterator[Make]:
    """make(grade, **settings): a teacher, and its server."""
    with ExitStack() as stack:

        def served(grade: Grade = graded, **settings: Any) -> tuple[ServedTeacher, ChatServer]:
            tokenizer = by_letter()

            def script(asked: str, times: int) -> Answer:
                if asked == "/v1/models":
                    return Answer(raw=MODELS)
                ids = json.loads(asked) if asked[0] == "[" else tokenizer.encode(asked)
                answer = grade(ids)
                return answer if isinstance(answer, Answer) else reply(answer)

            server = stack.enter_context(chat_server(script))
            stated = {"base_url": server.url, "timeout": 5.0, "backoff": 0.0, "retries": 1}
            teacher = ServedTeacher(
                TeacherServerSettings.model_validate(stated | settings), "teacher.server"
            )
            stack.callback(teacher.close)
            return teacher, server

        yield served


def sequences(*rows: list[int]) -> Sequences:
    """Each with its first two tokens as the prompt."""
    masks = [np.arange(len(row)) >= 2 for row in rows]
    return Sequences(
        Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_), np.arange(len(rows), dtype=np.int64)
    )


def test_loss_tokens_have_the_server_s_logprobs_and_others_zeros(make: Make) -> None:
    teacher, server = make(model="b")
    column = teacher.logprobs(sequences([2, 3, 4, 5], [2, 3], [6, 7, 8])).result()
    rows = [row.tolist() for row in column]
    assert rows == [pytest.approx([0, 0, -0.4, -0.5]), [0, 0], pytest.approx([0, 0, -0.8])]
    assert teacher.identity == "server:b (org/b)"
    prompts = sorted(body["prompt"] for _, _, body in server.requests if body)
    assert prompts == [[2, 3, 4, 5], [6, 7, 8]]  # without a loss token nothing is asked


@pytest.mark.parametrize(
    ("grade", "cause"),
    [
        (lambda ids: [None], "3 tokens were sent, and 1 were graded"),
        (lambda ids: None, "has no prompt_logprobs, which vLLM's server gives"),
        (lambda ids: [None, {"1": {"logprob": -1.0}}, {}], "token 3 at place 1 .* which is none"),
        (lambda ids: [None, *({str(i): {"logprob": 0.5}} for i in ids[1:])], "which is none"),
        (lambda ids: [None, *({str(i): {"logprob": None}} for i in ids[1:])], "which is none"),
        (lambda ids: Answer(raw=b"<html>"), "no prompt_logprobs.*<html>"),
        (lambda ids: Answer(status=503, raw=b"full"), r"HTTP 503 .*full \(2 tries\)"),
    ],
)
def test_what_is_no_grade_ends_the_run_with_its_cause(make: Make, grade: Grade, cause: str) -> None:
    teacher, _ = make(grade)
    handle = teacher.logprobs(sequences([2, 3, 4]))
    with pytest.raises(RunError, match=rf"teacher\.server: http.* gave no grades: .*{cause}"):
        handle.result()


def test_a_server_that_reads_other_tokens_is_refused_by_name(make: Make) -> None:
    teacher, _ = make()
    teacher.require_same_tokens(by_letter(), ["abc", "cab"], "take another")
    shifted, _ = make(lambda ids: graded([i + 1 for i in ids]))
    with pytest.raises(UsageError, match=r"a at http.* another tokenizer .*'abc'.*; take another"):
        shifted.require_same_tokens(by_letter(), ["abc"], "take another")
    longer, _ = make(lambda ids: graded([1, *ids]))
    with pytest.raises(UsageError, match="as 4 tokens"):
        longer.require_same_tokens(by_letter(), ["abc"], "take another")


def test_a_model_that_the_server_lacks_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match=r"teacher\.server\.model = 'c': http.* has a, b"):
        make(model="c")


def test_nobody_at_the_address_is_told() -> None:
    settings = TeacherServerSettings(base_url="http://127.0.0.1:9/v1", retries=0)
    with pytest.raises(RunError, match=r"http://127.0.0.1:9/v1 gave no grades.*refused"):
        ServedTeacher(settings, "teacher.server")
