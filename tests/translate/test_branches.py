"""Branches of `if` and `case` in shell scripts: those that a script takes, as far as it says so."""

import pytest

from postgrad.translate.shell import commands


def words_of(script: str) -> list[list[str]]:
    return [words for words in commands(script) if words[0] == "run"]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$A" = gpu ]', True),
        ('[ "$A" != gpu ]', False),
        ('[[ "$A" == g* ]]', True),
        ('[ "${B:-1}" != 0 ] && [ "$A" = gpu ]', True),
        ('[ "$A" = npu ] || [ "$N" -ge 8 ]', True),
        ('[ "$N" -lt 8 ]', False),
        ('[ "$N" -eq 8 ] && ! [ -z "$A" ]', True),
        ('[ -n "$1" ]', False),
    ],
)
def test_the_branch_is_read_whose_condition_holds(condition: str, holds: bool) -> None:
    script = f"""
A=gpu
N=8
if {condition}; then
    X=yes
else
    X=no
fi
run $X
"""
    assert words_of(script) == [["run", "yes" if holds else "no"]]


def test_of_conditions_that_are_not_known_all_branches_are_read_and_the_last_value_stays() -> None:
    script = """
if [ -f somewhere ]; then
    X=first
    run a
elif [ "$UNSET" = 1 ]; then
    X=second
    run b
else
    X=third
fi
run $X
"""
    assert words_of(script) == [["run", "a"], ["run", "b"], ["run", "third"]]


def test_after_a_branch_that_holds_no_other_is_read() -> None:
    script = """
A=2
if [ $A -eq 1 ]; then X=one
elif [ $A -eq 2 ]; then
  X=two
elif [ $A -eq 2 ]; then
  X=again
else
  X=other
fi
run $X
"""
    assert words_of(script) == [["run", "two"]]


def test_a_case_is_read_by_its_pattern_and_the_first_where_the_word_is_not_known() -> None:
    script = """
case "{}" in
    gpu|cuda)
        N=8
        B=$((N * 2)) ;;
    npu) N=16 ;;
    *)
        N=0
        ;;
esac
run $N $B
"""
    assert words_of(script.format("cuda")) == [["run", "8", "16"]]
    assert words_of(script.format("npu")) == [["run", "16", "$B"]]
    assert words_of(script.format("tpu")) == [["run", "0", "$B"]]
    assert words_of(script.format("$(probe)")) == [["run", "8", "16"]]


def test_branches_within_branches_that_are_not_taken_are_not_read() -> None:
    script = """
A=1
if [ $A = 2 ]; then
    case $A in
        1) X=inner ;;
    esac
    if [ $A = 1 ]; then
        X=innermost
    fi
    run never
fi
if [ $A = 1 ]; then
    if [ $A = 2 ]; then
        X=no
    else
        X=yes
    fi
fi
run $X
"""
    assert words_of(script) == [["run", "yes"]]


def test_a_condition_on_one_line_is_a_command_as_before() -> None:
    assert commands("if [ 1 = 2 ]; then run a; fi")[0][:2] == ["if", "["]


@pytest.mark.parametrize("text", ["fi", "esac", "else", "case x in", "if [ a = b", ";;"])
def test_ends_without_beginnings_do_not_stop_a_script(text: str) -> None:
    assert words_of(f"run before\n{text}\n")[0] == ["run", "before"]


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ('A=${A:-"${HOME}/x"}\nrun $A', "${HOME}/x"),
        ("run ${A:-${B:-${HOME}/verl}/data}", "${HOME}/verl/data"),
        ('B=${B:-"$HOME/b"}\nA=${A:-"${B}/c"}\nrun "${A}"', "$HOME/b/c"),
        ("A=4 # four\nrun $A", "4"),
        ("A='$HOME'\nrun $A", "$HOME"),
        ("A=${A:-'plain'}\nrun $A", "plain"),
        ("A=${A:-$(probe 2>/dev/null && echo npu || echo gpu)}\nrun $A", "gpu"),
        ('L=(a "b c")\nrun "with ${L[*]} inside"', "with a b c inside"),
    ],
)
def test_defaults_lie_within_defaults_and_in_quotes(script: str, value: str) -> None:
    (words,) = words_of(script)
    assert words == ["run", value]
