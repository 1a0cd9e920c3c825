"""Where other systems put ranks, engines and roles: as [learner], [cluster] and [rollout]."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from postgrad.translate.draft import Draft
from postgrad.translate.images import BUILT_IN, STATES, carries_states, vllm_samples
from postgrad.translate.rules import Options, decimal, flag

ONE_RANK = "ranks share the work, and one trains here: give --devices N where there are more"
ASSUMED = "devices are not said, so one is assumed: give --devices N where more train"
WAY = "rollout.transport chooses by where GPUs are: CUDA IPC, NCCL, else host memory"
_APART = "built-in engines, a device each, apart from the ranks'"
_PYTHON = "its interpreter: rollout.vllm.python or POSTGRAD_VLLM_PYTHON"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a system calls the settings of its vLLM engines; "" for one that it does not have."""

    count: str = ""
    tensor_parallel: str = ""
    memory: str = ""  # the share of a GPU's memory
    eager: str = ""
    sleep: str = ""


def processes(draft: Draft, name: str, devices: int | None, machines: int | None = None) -> int:
    """How many devices train; where there are several, a rank for each, started by Ray. devices:
    None where the source does not say, which is taken for 1. machines: over which they are spread.
    """
    if devices is None:
        draft.notes.append(ASSUMED)
        return 1
    if devices > 1:
        draft.put("learner.ranks", devices, name)
        draft.put("cluster.type", "ray", "on one machine too")
        if machines and machines > 1 and devices % machines == 0:
            draft.put("cluster.policy.machines", machines)
    return devices


def divided(draft: Draft, stage: tuple[str, Any], shares: Mapping[str, tuple[str, Any]]) -> None:
    """[learner] sharding and parallelism. stage: the option's name and the ZeRO stage. shares: by
    key of [learner], the option's name and how many ranks share a sequence, a matrix or experts.
    """
    ranks = int(draft.get("learner.ranks") or 1)
    for key, (name, size) in shares.items():
        size = int(size or 1)
        if size > 1 and key != "expert_parallel" and carries_states(draft):
            draft.miss(name, size, STATES)
        elif size > 1 and ranks % size == 0:
            draft.put(f"learner.{key}", size)
        elif size > 1 and ranks == 1:
            draft.miss(name, size, ONE_RANK)
        elif size > 1:
            draft.miss(name, size, f"{ranks} ranks do not divide into {size}")
    name, level = stage
    if level in (None, 0):
        return
    if ranks == 1 and ASSUMED in draft.notes:
        draft.miss(name, level, ONE_RANK)
    elif ranks == 1:
        draft.skip(name, level, "one rank trains, and has nothing to divide")
    elif draft.get("model.quantize"):
        draft.miss(name, level, "every rank holds all weights that are in four bits")
    else:
        draft.put("learner.sharding", f"zero{level}")


def replicas(draft: Draft) -> int:
    """Data-parallel replicas: groups of ranks that share no sequence and no matrix."""
    tensor = int(draft.get("learner.tensor_parallel") or 1)
    context = int(draft.get("learner.context_parallel") or 1)
    return max(1, int(draft.get("learner.ranks") or 1) // (tensor * context))


def engines(
    draft: Draft, options: Options, names: EngineOptions, shared: bool, fill: bool = False
) -> None:
    """[rollout.vllm] and the place of the engines. shared: on the ranks' devices, else on their
    own. fill: as many engines as the ranks' devices hold, where no number is stated.
    """
    if not vllm_samples(draft.images):
        _built_in(draft, options, names)
        if not shared:
            draft.put("cluster.type", "ray", "on one machine too")
            draft.put("cluster.rollout.workers", _integer(options, names.count), _APART)
        return
    tensor = _integer(options, names.tensor_parallel)
    ranks = int(draft.get("learner.ranks") or 1)
    count = max(1, ranks // tensor) if fill else _integer(options, names.count)
    draft.put("rollout.type", "vllm", _PYTHON)
    if shared:
        _on_the_ranks(draft, names, count, tensor, ranks)
    else:
        gpus = f"engines of {tensor} GPUs each" if tensor > 1 else "engines, a GPU each"
        draft.put("cluster.type", "ray", "on one machine too")
        draft.put("cluster.rollout.workers", count, f"{gpus}, apart from the ranks'")
        draft.put("rollout.vllm.tensor_parallel", tensor if tensor > 1 else None)
    memory = options.take(names.memory) if names.memory else None
    if memory is not None:
        stated = options.states(names.memory)
        draft.put("rollout.vllm.memory_fraction", decimal(memory),
                  "" if stated else f"{draft.system}'s default")  # fmt: skip
    eager = flag(options.take(names.eager, False)) if names.eager else False
    draft.put("rollout.vllm.eager", eager or None)
    if names.sleep:
        asleep = options.take(names.sleep)
        if shared and ranks > 1 and asleep is not None and not flag(asleep):
            draft.put("rollout.vllm.sleep", False)


def _built_in(draft: Draft, options: Options, names: EngineOptions) -> None:
    """No vLLM: the built-in engine samples, so that settings of vLLM say nothing."""
    for name in (names.count, names.tensor_parallel, names.memory, names.eager, names.sleep):
        if name and options.states(name):
            draft.miss_always(name, options.take(name), BUILT_IN)
        elif name:
            options.take(name)


def _on_the_ranks(draft: Draft, names: EngineOptions, count: int, tensor: int, ranks: int) -> None:
    """Engines on the ranks' devices. One that spans several has those of as many ranks of a
    machine; where the ranks do not divide into them, an engine on each device stands for it.
    """
    machines = int(draft.get("cluster.policy.machines") or 1)
    divides = ranks // machines % tensor == 0
    each = tensor if divides else 1
    if ranks > 1:
        draft.put("cluster.policy.colocate", "rollout", "engines on the ranks' devices")
        workers = min(count * tensor, ranks) // each
        if workers * each < ranks or each > 1:
            draft.put("cluster.rollout.workers", workers)
    if tensor > 1 and divides:
        draft.put("rollout.vllm.tensor_parallel", tensor)
    elif tensor > 1:
        some = f"{ranks // machines} ranks of a machine do not divide into {tensor}"
        why = (
            f"{some if ranks > 1 else 'one rank has one device'}, and engines share the devices of "
            "ranks: here each device has an engine with all weights; give --devices N if more train"
        )
        draft.miss(names.tensor_parallel, tensor, why)


def engine_beside(draft: Draft) -> bool:
    """Whether an engine samples on the devices of the learner, so that it may leave them."""
    if draft.job != "rl":
        return False
    apart = draft.get("cluster.rollout.workers") and not draft.get("cluster.policy.colocate")
    return not apart


def _integer(options: Options, name: str) -> int:
    return max(1, options.number(name, 1)) if name else 1


def role_elsewhere(draft: Draft, role: str, gpus: int, beside: str | None = None) -> None:
    """A frozen role or a critic on devices of its own. beside: the role whose devices it shares."""
    draft.put("cluster.type", "ray", "on one machine too")
    if beside is not None:
        draft.put(f"cluster.{role}.colocate", beside)
    else:
        draft.put(f"cluster.{role}.ranks", gpus)
