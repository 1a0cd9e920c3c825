"""What scores the answers of Open-Instruct's GRPO and PPO: verifiers that rows name, a judge, a
reward model, penalties, and environments with their tools.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

from postgrad.translate import common
from postgrad.translate.draft import Draft
from postgrad.translate.rules import Options, decimal, flag, texts
from postgrad.translate.tables.open_instruct import VERIFIERS, WORLDS

_GUESSING = re.compile(r"guess[_-]number")
_PLAYED = re.compile(r"rlenv[-_]([a-z]+)")  # in names of datasets whose rows an environment plays
_PROVIDER = re.compile(r"^(hosted_vllm|openai|azure|anthropic|gemini)/")  # before a judge's name
_EVERY_TEST = 0.99  # a share of tests that only all of them reach, of fewer than a hundred
_SERVER = "http://localhost:8000/v1"
_OTHER = (
    "a row whose column dataset names a verifier that [[rewards]] lack is refused at the start; "
    "there it has a reward of 0"
)
_NEEDS = {"code": "code_api_url", "judge": "llm_judge_model"}  # of rows that ask for them


def scored(draft: Draft, options: Options, program: str) -> None:
    """[[rewards]] and [environment]; to be called when data.path and batches are known."""
    if not _guessing(draft, options):
        if _environment(draft, options):
            _rewarded_by_it(draft, options)
        else:
            _rewards(draft, options, program)
    _non_stop(draft, options, program)
    _tags(draft, options)


def _paths(draft: Draft) -> list[str]:
    """The datasets of [data]."""
    return [str(value) for place, value in draft.values.items()
            if place[0] == "data" and place[-1] == "path"]  # fmt: skip


def _rewards(draft: Draft, options: Options, program: str) -> None:
    weight = decimal(options.take("verification_reward"))
    verified = flag(options.take("apply_verifiable_reward", program == "grpo"))
    path = options.take("reward_model_path")
    factor = decimal(options.take("reward_model_multiplier", 1.0))
    if program == "ppo" and path:
        draft.put("reward_model.model.path", path, "the critic starts from it, as there")
        if factor:
            draft.reward("reward_model", weight=factor)
    if verified:
        _verifiers(draft, options, weight)
    elif not (program == "ppo" and path and factor):
        draft.reward("my_rewards:score", "the source names no reward: write this function")


def _verifiers(draft: Draft, options: Options, weight: float) -> None:
    """The verifiers that rows name in their column `dataset`: a single one where the names of all
    datasets and the options say so, else each for the rows that name it.
    """
    named = [_kinds(path) for path in _paths(draft)]
    kinds = set[str]().union(*named)
    if not (named and all(named)):
        kinds |= {"gsm8k", "math", "ifeval"}
    kinds |= {kind for kind, option in _NEEDS.items() if options.states(option)}
    is_single = len(kinds) == 1
    if not is_single:
        draft.notes.append(_OTHER)
    remapped = _remapped(draft, options, is_single=is_single)
    for _, column, type, settings, other in VERIFIERS:
        if type not in kinds:
            continue
        values = [*column, *(old for old, new in remapped if new in column)]
        when = {} if is_single else {"when": {"dataset": values}}
        comment = "as the dataset's name says" if is_single else "rows say it in the column dataset"
        read = _CONFIGURED[type](draft, options) if type in _CONFIGURED else settings
        draft.reward(type, comment + other, weight=weight, **when, **read)


def _kinds(path: str) -> set[str]:
    """The verifiers that words of a dataset's name speak of; "gsm8k" counts as "gsm" too."""
    words = set(re.split(r"[/_-]", path.lower()))
    words |= {"gsm" for word in words if word.startswith("gsm")}
    return {type for kind_words, _, type, _, _ in VERIFIERS if words & {*kind_words.split()}}


def _remapped(draft: Draft, options: Options, *, is_single: bool) -> list[tuple[str, str]]:
    """(name in a row, name of the verifier that scores it), where the source says OLD=NEW."""
    stated = options.take("remap_verifier")
    old, _, new = str(stated or "").partition("=")
    if stated and new not in {name for _, column, *_ in VERIFIERS for name in column}:
        draft.miss("remap_verifier", stated, f"no verifier here is called {new}")
        return []
    if stated and is_single:
        draft.skip("remap_verifier", stated, "one verifier scores all rows")
    return [(old, new)] if stated else []


def _code(draft: Draft, options: Options) -> dict[str, Any]:
    """Settings of the verifier of programs, whose tests run on this machine and on no server."""
    seconds = decimal(options.take("code_max_execution_time", 1.0))
    least = decimal(options.take("code_pass_rate_reward_threshold", 0.0))
    if url := options.take("code_api_url"):
        draft.skip("code_api_url", url, "programs run in this machine's sandbox (docs/sandbox.md)")
    if flag(options.take("code_apply_perf_penalty", False)):
        why = "the time that a program takes is no part of its score"
        draft.miss("code_apply_perf_penalty", True, why)
    if 0.0 < least < _EVERY_TEST:
        why = "a share of passed tests counts as it is (partial); there it is 0 below this"
        draft.miss("code_pass_rate_reward_threshold", least, why)
    return {"partial": least < _EVERY_TEST, "test_cpu_seconds": seconds,
            "cpu_seconds": max(30.0, min(300.0, 10.0 * seconds))}  # fmt: skip


def _judge(draft: Draft, options: Options) -> dict[str, Any]:
    """Settings of the judge. Its prompt and its rubric are those of here."""
    model = _PROVIDER.sub("", str(options.take("llm_judge_model", "azure/gpt-4o-mini-standard")))
    if longest := options.take("llm_judge_max_context_length"):
        why = "there a longer prompt of the judge is cut; here its server refuses it, and the "
        draft.miss("llm_judge_max_context_length", longest, f"{why}sample is a recorded failure")
    return {
        "base_url": _SERVER,
        "model": model,
        "temperature": decimal(options.take("llm_judge_temperature", 1.0)),
        "max_tokens": options.number("llm_judge_max_tokens", 2048),
        "timeout": decimal(options.take("llm_judge_timeout", 60)),
    }


_CONFIGURED = {"code": _code, "judge": _judge}


def _environment(draft: Draft, options: Options) -> bool:
    """[environment] for the tools of a run, or for a world that its rows or tools name. Returns
    whether the rewards are the environment's alone.
    """
    tools = texts(options.take("tools") or [])
    played = [match[1] for path in _paths(draft) if (match := _PLAYED.search(path))]
    worlds = [*played, *(tool for tool in tools if tool in WORLDS)]
    if not tools and not worlds:
        return False
    if worlds:
        name = worlds[0].title().replace("_", "")
        comment = f"write it: the {worlds[0]} of Open-Instruct is not here (docs/environments.md)"
        draft.put("environment.type", f"my_environment:{name}", comment)
        if others := [tool for tool in tools if tool != worlds[0]]:
            draft.miss("tools", others, "an environment is one world or one set of tools")
    else:
        _tools(draft, options, tools)
    turns = "max_steps" if options.states("max_steps") else "max_tool_calls"
    draft.put("environment.max_turns", options.number(turns, 5), "steps there: each call is one")
    if each := options.number("per_turn_max_tokens", 0):
        most = int(draft.get("rollout.max_new_tokens") or each)
        draft.put("environment.turn_tokens", [min(each, most)])
    if workers := options.number("pool_size", 0):
        draft.put("environment.concurrent", workers, "pool_size there")
    _parser(draft, options)
    return bool(played)


def _tools(draft: Draft, options: Options, tools: Sequence[str]) -> None:
    """The environment `tools`: functions that the user writes, Python in the sandbox, a server."""
    called, configs = options.texts("tool_call_names"), options.take("tool_configs")
    listed: list[Any] = cast("list[Any]", configs) if isinstance(configs, list) else [configs]
    draft.put("environment.type", "tools")
    functions: list[str] = []
    for number, tool in enumerate(tools):
        config = listed[number] if number < len(listed) else None
        url = config.get("server_url") if isinstance(config, dict) else None  # pyright: ignore
        if tool == "generic_mcp" and isinstance(url, str):
            draft.put("environment.mcp.server.url", url)
            continue
        name = called[number] if number < len(called) else tool
        functions.append("python" if tool == "python" else f"my_tools:{name}")
        if config:
            of_sandbox = "this machine's sandbox has limits of its own"
            why = of_sandbox if tool == "python" else f"settings of {tool} belong into its function"
            draft.miss("tool_configs", config, why)
    written = [name for name in functions if ":" in name]
    comment = f"write {', '.join(name.partition(':')[2] for name in written)}" if written else ""
    draft.put("environment.tools", functions or None, comment)


def _parser(draft: Draft, options: Options) -> None:
    """environment.tool_format; left out, the chat template says which."""
    parser = options.take("tool_parser_type")
    name = str(parser or "auto").removeprefix("vllm_")
    if name not in common.TOOL_FORMATS:
        draft.miss("tool_parser_type", parser, "environment.tool_format has no such format")
    elif draft.get("environment.type") == "tools":
        draft.put("environment.tool_format", common.TOOL_FORMATS[name])
    elif parser:
        draft.skip("tool_parser_type", parser, "your environment reads the turns")


def _rewarded_by_it(draft: Draft, options: Options) -> None:
    """Verifiers have no part in the reward of rows that an environment plays."""
    for name in ("verification_reward", "apply_verifiable_reward"):
        if options.states(name):
            draft.skip(name, options.take(name), "the environment rewards")
        options.take(name)


def _guessing(draft: Draft, options: Options) -> bool:
    """[environment] for the game of guessing a number; false for any other task."""
    tools = texts(options.stated.get("tools") or [])
    paths = [str(value) for place, value in draft.values.items() if place[-1] == "path"]
    if not any(map(_GUESSING.search, (*tools, *paths))):
        return False
    if others := [
        name for name in texts(options.take("tools") or []) if not _GUESSING.search(name)
    ]:
        draft.miss("tools", others, "an environment is one game or one set of tools")
    samples, _ = common.per_step(draft)
    each = int(draft.get("batch.n_samples_per_prompt"))
    for place in [place for place in draft.values if place[0] == "data" and place[-1] != "max_len"]:
        draft.values.pop(place)
        draft.comments.pop(place, None)
    draft.put("environment.type", "guess_number",
              "a turn is a number, without a call of a tool; only a hit is rewarded")  # fmt: skip
    draft.put("environment.max_turns", options.number("max_steps", 20))
    draft.put("data.path", "postgrad.rollout.environments.guess_number:rows",
              "games from 1 to 100, made here")  # fmt: skip
    draft.put("data.prompt", "question")
    draft.put("data.answer", "answer")
    draft.put("data.size", max(samples, options.number("total_episodes")) // each)
    draft.put("data.task", {"lowest": 1, "highest": 100, "least": 100, "most": 100})
    for name in ("verification_reward", "apply_verifiable_reward", "tool_parser_type"):
        if options.states(name):
            draft.skip(name, options.take(name), "the game rewards, and its turns are plain text")
        options.take(name)
    return True


def _non_stop(draft: Draft, options: Options, program: str) -> None:
    """A reward that replaces all others of a sample that was cut off."""
    values = [options.take(name) for name in ("non_stop_penalty_value", "penalty_reward_value")]
    if flag(options.take("non_stop_penalty", False)):
        default = -10.0 if program == "ppo" else 0.0
        value = next((decimal(stated) for stated in values if stated is not None), default)
        common.cut_off(draft, value, "non_stop_penalty replaces the reward of what was cut off")


def _tags(draft: Draft, options: Options) -> None:
    """Whether a thought ends and an answer stands in its tags: a gate, or a part of the sum."""
    option = "apply_r1_style_format_reward"
    scale = decimal(options.take("r1_style_format_reward", 1.0))
    is_added = flag(options.take("additive_format_reward", False))
    if not flag(options.take(option, False)):
        return
    pattern = {"pattern": r"</think>\s*<answer>.*?</answer>", "dot_all": True}
    if is_added:
        draft.reward("regex", "r1_style_format_reward", **pattern, weight=scale)
    elif scale == 1.0:
        comment = "apply_r1_style_format_reward: without the tags the reward is 0"
        draft.reward("regex", comment, **pattern, gate=True)
        draft.put(f"rewards.{draft.rewards - 1}.weight", 0.0)
    else:
        why = "there verifiers count only where r1_style_format_reward is 1"
        draft.miss(option, True, why)
