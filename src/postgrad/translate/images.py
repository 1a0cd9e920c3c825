"""Runs that read images: what says so in a source, and what a recipe for them has."""

import re
from collections.abc import Mapping
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import shown
from postgrad.models.settings import IMAGE_TYPES
from postgrad.translate.draft import Draft, ImageRun
from postgrad.translate.rules import Rule, flag, missing_but

_OPTIONS = {  # that only such runs have
    "data.image_key", "image_key", "data.max_images_per_prompt", "max_images_per_prompt",
    "actor.freeze_visual_encoder", "freeze_visual_encoder", "freeze_vision_tower",
    "model.vlm.vision_encoder_attr", "policy.is_vlm",
}  # fmt: skip
_PROCESSOR = ("data.default.processor", "vlm_hf_data_processor")
# In names of models and datasets: of pictures, or of pictures with text.
_OF_IMAGES = re.compile(
    r"(?i)\bVLM?\b|-VLM|VLM2|llava|idefics|pixtral|paligemma|-vision\b|vsft|rlaif-v\b|multimodal|"
    r"geometry3k|geo3k|-omni\b"
)
MODEL = re.compile(
    r"(^|\.)(model_name_or_path|pretrain|sft_model_path|model\.name)$|^policy\.model_name$|"
    r"^(actor_rollout_ref\.)?model\.path$"
)
_NAMES = re.compile(r"model_name|model\.name|pretrain|dataset|prompt_data|model\.path$|_files$")
# Models by their names: of families whose types are not in IMAGE_TYPES, and of those that only the
# built-in engine samples with images.
_UNREAD = re.compile(
    r"(?i)qwen-?vl|qwen2-vl|qwen[\d.]*-omni|gemma-?3n|gemma-?4|"
    r"llama-3\.2-\d+b-vision|llama-?4|nemotron.*(omni|vl\b)|idefics-?2|idefics-\d+b|paligemma|"
    r"phi-?[34].*(vision|multimodal)|minicpm-?[vo]|deepseek-vl|glm-4\.\d+v|kimi-vl|molmo|internvl-?[12]"
)
_BUILT_IN = re.compile(
    r"(?i)smolvlm|idefics-?3|llava|pixtral|gemma-?3|mistral-small|ministral|internvl"
)
# Of which every checkpoint reads images, also where a run's rows are text alone. Most of their
# layers are gated delta rules.
_READS_BOTH = re.compile(r"(?i)qwen3\.[5-9]\b")
STATES = "its layers carry a state along each sequence, whose rows and matrices ranks cannot share"
BUILT_IN = (
    "the built-in engine samples: of models that read images vLLM samples Qwen2.5-VL, Qwen3-VL and "
    "Qwen3.5 alone"
)
KEPT = "the rows have no images: what reads them stays as it is"
ALL_TRAINED = "all of a model is trained, but for what model.freeze names"
ON_LANGUAGE = "on the language part; there on layers of these names in the tower too"
_FREEZES = {  # option after its section -> part of model.freeze, None for one that no model has
    "freeze_vision_tower": "vision",
    "freeze_vision_model": "vision",
    "freeze_vision_projection": "projector",
    "freeze_audio_tower": None,
    "freeze_sound_encoder": None,
    "freeze_sound_projection": None,
}


def require_read(run: ImageRun) -> None:
    """Raises UsageError for a run whose model is known not to be trained on images here."""
    if _UNREAD.search(run.model):
        raise UsageError(
            f"{run.needed}: this run needs images or sound, and postgrad does not train "
            f"{shown(run.model)} on them. It trains on images models of the types "
            f"{', '.join(IMAGE_TYPES)} (docs/models.md): name one of those with {run.option}, "
            "which may stand behind the source"
        )


def image_run(program: str, options: Mapping[str, Any]) -> ImageRun | None:
    """The images of a source's run, or that its model could read some; None where nothing in it
    says so.
    """
    needed = _needed(program, options)
    named = ((name, str(value)) for name, value in options.items() if MODEL.search(name) and value)
    option, model = next(named, ("", ""))
    if needed is None and not _READS_BOTH.search(model):
        return None
    return ImageRun(needed or f"--{option} {shown(model)}", model, option, needed is not None)


def _needed(program: str, options: Mapping[str, Any]) -> str | None:
    if re.search(r"(^|_)vlm", program):
        return program
    for name, value in options.items():
        if (name in _OPTIONS and value not in (None, False, 0)) or (name, value) == _PROCESSOR:
            return f"--{name} {shown(value)}"
    for name, value in options.items():
        if _NAMES.search(name) and _OF_IMAGES.search(str(value)):
            return f"--{name} {shown(value)}"
    return None


def carries_states(draft: Draft) -> bool:
    """Whether the run's model is known to have layers that carry a state."""
    return draft.images is not None and bool(_READS_BOTH.search(draft.images.model))


def vllm_samples(run: ImageRun | None) -> bool:
    """Whether vLLM can sample the run's model, as far as its name says which type it is."""
    return run is None or not _BUILT_IN.search(run.model)


def freeze(draft: Draft, *parts: str, comment: str = "") -> None:
    """Adds parts to model.freeze."""
    kept = draft.get("model.freeze", [])
    draft.put("model.freeze", [*kept, *(part for part in parts if part not in kept)], comment)


def keep_towers(draft: Draft) -> None:
    """Freezes what reads images in a run on text alone."""
    if draft.images is not None and not draft.images.in_rows:
        freeze(draft, "vision", "projector", comment=KEPT)


def freezes(prefix: str = "") -> dict[str, Rule]:
    """Rules for switches that keep a part of a model from training. prefix: of their names."""

    def of(part: str | None) -> Rule:
        def rule(draft: Draft, name: str, value: Any, _: str) -> None:
            if not flag(value):
                draft.skip(name, value, ALL_TRAINED)
            elif part is None or draft.images is None:
                draft.skip(name, value, "the run does not read what this part encodes")
            else:
                freeze(draft, part)

        return rule

    rules = {f"{prefix}{name}": of(part) for name, part in _FREEZES.items()}
    keeps = missing_but(("False", "false"), 'model.freeze knows "vision" and "projector"')
    return rules | {f"{prefix}freeze_language_model": keeps}
