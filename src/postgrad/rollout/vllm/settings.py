"""Settings of vLLM's processes, and the arguments of its engine that a recipe cannot give."""

from typing import Any, Literal, cast

from pydantic import Field, field_validator

from postgrad.core.settings import Settings

# Arguments of vLLM's engine that are not for engine_args: what says them here, or why not.
OWN_ARGUMENTS = {
    **dict.fromkeys(
        ("model", "served_model_name", "hf_config_path", "revision", "code_revision"), "model.path"
    ),
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision"), "model.path"),
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_len",
    "max_num_seqs": "rollout.slots",
    **dict.fromkeys(("kv_cache_memory_bytes", "num_gpu_blocks_override"), "rollout.cache_tokens"),
    "gpu_memory_utilization": "rollout.vllm.memory_fraction",
    **dict.fromkeys(("tensor_parallel_size", "device_ids"), "rollout.vllm.tensor_parallel"),
    **dict.fromkeys(("data_parallel_size", "data_parallel_size_local"), "rollout.vllm.engines"),
    "enforce_eager": "rollout.vllm.eager",
    "enable_sleep_mode": "rollout.vllm.sleep",
    "seed": "rollout.vllm.seeded",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"), "rollout.vllm.lora"
    ),
    "enable_return_routed_experts": "rollout.router_replay",
}
SET_ARGUMENTS = (  # by a run, for what it does with an engine
    "distributed_executor_backend", "enable_chunked_prefill", "enable_prefix_caching",
    "generation_config", "limit_mm_per_prompt", "logprobs_mode", "mm_device_do_normalize",
    "mm_processor_cache_gb", "override_generation_config", "pipeline_parallel_size", "runner",
    "skip_mm_profiling", "skip_tokenizer_init", "structured_outputs_config",
    "weight_transfer_config", "worker_extension_cls",
)  # fmt: skip
UNTRUSTED_ARGUMENTS = (  # they load code or pickles, open a network, or take secrets
    "additional_config", "config_format", "download_dir", "ec_transfer_config", "hf_token",
    "io_processor_plugin", "kv_events_config", "kv_transfer_config", "load_format",
    "log_config_file", "logits_processors", "model_class_overrides", "model_loader_extra_config",
    "otlp_traces_endpoint", "profiler_config", "pt_load_map_location", "reasoning_parser_plugin",
    "scheduler_cls", "trust_remote_code", "worker_cls",
)  # fmt: skip


def refused_argument(name: str, value: object = None) -> str | None:
    """Why an argument of vLLM's engine is not for rollout.vllm.engine_args; None: it is."""
    if name in OWN_ARGUMENTS:
        return f"the recipe says it with {OWN_ARGUMENTS[name]}"
    if name in SET_ARGUMENTS:
        return "the run sets it"
    if name in UNTRUSTED_ARGUMENTS:
        return "a recipe must not load code, open a network or hold a secret with it"
    if name == "speculative_config" and not _drafts_without_model(value):
        return 'the engine gets no weights of a second model; method = "ngram" drafts without'
    return None


def _drafts_without_model(value: object) -> bool:
    return isinstance(value, dict) and cast(dict[str, Any], value).get("method") == "ngram"


class VLLMSettings(Settings):
    """Processes with vLLM, for type = "vllm".

    `python`: of the environment that has vLLM; left out, that of the environment variable
    POSTGRAD_VLLM_PYTHON. `engines` processes share the prompts, each over `tensor_parallel`
    devices. `memory_fraction`: of a GPU, for weights, keys and values. `eager`: no compiled graphs;
    left out, on CPUs alone. `sleep`: memory is given back while the learner works; left out, where
    the two share a GPU. There weights are dropped and come with the next publish; on GPUs of its
    own an engine keeps them in the host's memory. `seeded`: each sample has a seed of its own, so
    that its tokens do not depend on what is sampled beside it; false: vLLM draws for all rows of a
    step at once, which is faster, and no run can be repeated. `lora`, with [model.lora]: "merged"
    sends whole weights with the adapter merged into them after each step, "adapter" the adapter
    alone, which vLLM applies to the base that it read at its start. `engine_args`: more arguments
    of vLLM's engine, by vLLM's names; a resume needs the same.
    """

    python: str | None = None
    engines: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    eager: bool | None = None
    sleep: bool | None = None
    seeded: bool = True
    lora: Literal["merged", "adapter"] = "merged"
    start_seconds: float = Field(default=600.0, gt=0.0)  # until a process can sample
    engine_args: dict[str, Any] = {}  # such as { kv_cache_dtype = "fp8" }

    @field_validator("engine_args")
    @classmethod
    def _left_to_recipes(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        problems: list[str] = []
        for name, value in arguments.items():
            if "-" in name:
                spelled = name.lstrip("-").replace("-", "_")
                problems.append(f"{name!r}: here vLLM's arguments have underscores: {spelled!r}")
            elif why := refused_argument(name, value):
                problems.append(f"{name!r} of vLLM is not for engine_args: {why}")
        if problems:
            raise ValueError("; ".join(problems))
        return arguments

    @property
    def devices(self) -> int:
        """Of all processes together."""
        return self.engines * self.tensor_parallel
