"""Notes of a plan about rollout engines that are not built in."""

from collections.abc import Iterator

from postgrad.plan.hardware import Device
from postgrad.recipe.recipe import Recipe


def engine_notes(recipe: Recipe, device: Device) -> Iterator[str]:
    """Sentences for people about the recipe's engine; none where it is the built-in one."""
    rollout = recipe.rollout_settings
    if rollout is None:
        return
    vllm = rollout.vllm
    if rollout.type == "openai":
        yield (
            f"answers come from {rollout.openai.base_url}: what that server takes is not in this "
            "plan"
        )
    if rollout.type != "vllm":
        return
    places = "" if vllm.tensor_parallel == 1 else f" over {vllm.tensor_parallel} devices each"
    copies = "1 process" if vllm.engines == 1 else f"{vllm.engines} processes"
    yield (
        f"vLLM: {copies}{places}, each with a whole copy of the weights and a cache; the engine's "
        "lines are those of one built-in engine"
    )
    if not device.is_cpu:
        reserved = vllm.memory_fraction * device.memory_bytes / 1e9
        yield (
            f"vLLM reserves rollout.vllm.memory_fraction = {vllm.memory_fraction:g} of each of its "
            f"devices, {reserved:.1f} GB, whatever its lines say"
        )
