"""What a plan says of rollout engines that are not built in."""

from collections.abc import Iterator

from postgrad.plan.hardware import Device
from postgrad.recipe.recipe import Recipe


def notes(recipe: Recipe, device: Device) -> Iterator[str]:
    """What a person should know of the engine."""
    rollout = recipe.rollout_settings
    if rollout is None:
        return
    one = rollout.vllm
    if rollout.type == "openai":
        yield (
            f"answers come from {rollout.openai.base_url}: what that server takes is not in this "
            "plan"
        )
    if rollout.type != "vllm":
        return
    places = "" if one.tensor_parallel == 1 else f" over {one.tensor_parallel} devices each"
    copies = "1 process" if one.engines == 1 else f"{one.engines} processes"
    yield (
        f"vLLM: {copies}{places}, each with a whole copy of the weights and a cache; the engine's "
        "lines are those of one built-in engine"
    )
    if not device.is_cpu:
        reserved = one.memory_fraction * device.memory_bytes / 1e9
        yield (
            f"vLLM reserves rollout.vllm.memory_fraction = {one.memory_fraction:g} of each of its "
            f"devices, {reserved:.1f} GB, whatever its lines say"
        )
